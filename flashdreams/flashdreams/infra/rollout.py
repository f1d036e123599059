"""The friendly form of the chunk loop: an iterator of chunks that can be steered between them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from flashdreams.core.controls import Control, ControlError, ControlSpec, ControlWriter
from flashdreams.core.lengths import chunks_for
from flashdreams.infra.cache import PipelineCache
from flashdreams.infra.chunk import Chunk, Decoded, InTurn, Lane, Promised
from flashdreams.infra.images import from_uint8, given_frames

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline

ControlSource = Sequence[Any] | Callable[[int, int], Sequence[Any]] | None
"""One control per pixel frame of the rollout, or a function of (start, stop) that gives those of a chunk and is asked
for every frame once, in order. For a batch of prompts: a list of such sequences, one per sample. Frames beyond its end
have no control. Controls are whatever ``config.encoder.takes`` accepts."""


class Observer(Protocol):
    """Is told what a rollout was given and made, as it happens; what it needs, it keeps."""

    def prompted(self, cache: PipelineCache, prompts: Sequence[str], policy: str) -> None:
        """New prompts, one per sample, from the next chunk on; ``cache`` holds their conditions."""

    def set_loras(self, cache: PipelineCache) -> None:
        """Other LoRAs from the next chunk on."""

    def made(self, cache: PipelineCache, chunk: Chunk, controls: Sequence[Sequence[Control | None]]) -> None:
        """A chunk, not yet committed, and per sample the controls of its frames and of those looked ahead at."""


class Rollout(Iterator[Chunk]):
    """Iterate to generate. Frames are handed out before their chunk is committed; where the pipeline has a
    ``decode_lane``, the chunk is decoded while it is committed and the next one is made.

    Between chunks, :meth:`set_prompt`, :meth:`set_control` and :meth:`set_loras` steer what follows, and :meth:`save`
    writes a state that :meth:`StreamInferencePipeline.resume` continues. :meth:`close` frees the memory; so does the
    end of iteration.
    """

    def __init__(
        self,
        pipeline: StreamInferencePipeline,
        cache: PipelineCache,
        *,
        batched: bool,
        num_chunk: int | None = None,
        control: ControlSource = None,
        record: ControlWriter | None = None,
        first_frame: int = 0,
    ) -> None:
        self.pipeline = pipeline
        self.batched = batched
        self.num_chunk = num_chunk
        self._cache: PipelineCache | None = cache
        self._control = control
        self.frame = first_frame
        """Pixel frames generated so far."""
        self._record = record
        self.decodes = True
        """Whether chunks are decoded; without, their ``frames`` hold none."""
        self._lane: Lane = pipeline.decode_lane or InTurn(pipeline.device)
        self._phases: list[tuple[dict[str, float], str, Any, Any]] = []
        """Timings to be filled in, by phase, with the moments of its begin and end."""
        self.observer: Observer | None = None
        self._ahead: list[list[Control | None]] = [[]] * cache.layout.batch
        """Controls of the frames after those, as far as the encoder has seen them already."""
        self._last: Chunk | None = None
        self._failed: BaseException | None = None

    @property
    def cache(self) -> PipelineCache:
        """The rollout's state; an error once it is closed."""
        if self._cache is None:
            raise ValueError("this rollout is closed; start another, or resume a saved one")
        return self._cache

    @property
    def next_controls(self) -> tuple[int, int]:
        """Frames ``(start, stop)`` whose controls the next chunk asks its source for."""
        cache, config = self.cache, self.pipeline.config
        first, last = cache.layout.plan.span(cache.autoregressive_index + bool(cache.pending))
        frames = config.decoder.frames(first, last) if config.decoder else last - first
        ahead = config.encoder.lookahead if config.encoder else 0
        return self.frame + len(self._ahead[0]), self.frame + frames + ahead

    def __next__(self) -> Chunk:
        cache = self._cache
        made = 0 if cache is None else cache.autoregressive_index + bool(cache.pending)
        if cache is None or (self.num_chunk is not None and made >= self.num_chunk):
            self.close()  # nothing follows, so that the last chunk need not be committed
            raise StopIteration
        if not self.pipeline.config.diffusion_model.fused_commit:
            self.flush()
        try:
            chunk = self._generate(cache)
        except StopIteration as error:  # would end the loop as if all were well
            raise RuntimeError("a module raised StopIteration while it made a chunk") from error
        beside = self.pipeline.decode_lane is not None and not self.pipeline.config.diffusion_model.fused_commit
        if beside and (self.num_chunk is None or made + 1 < self.num_chunk):
            try:
                self.flush()
            except BaseException as error:  # the chunk is made; what went wrong after it is told the next time
                self._failed = error
        return chunk

    def _generate(self, cache: PipelineCache) -> Chunk:
        index, timings = cache.autoregressive_index + bool(cache.pending), {}
        start, stop = cache.layout.plan.span(index)
        decoder = self.pipeline.config.decoder
        frames = decoder.frames(start, stop) if decoder else stop - start
        with self._timed(timings, "dit"):
            controls = self._controls(self.next_controls[1])
            input = self.pipeline.encode_controls(controls, index, cache)
            with torch.no_grad():
                latent = self.pipeline.diffusion_model.generate(index, cache, input)
        decoded = self._decode(latent, cache, timings)
        known = len(self._ahead[0])
        first = self.frame + known
        self._ahead = [row[frames:] for row in controls]
        self.frame += frames
        self._last = Chunk(index, latent, decoded, timings)
        if self._record is not None:
            record, self._record = self._record, None  # a file that failed is not tried again
            record.write(first, controls[0][known:])
            self._record = record
        if self.observer is not None:
            self.observer.made(cache, self._last, controls)
        return self._last

    def _decode(self, latent: Tensor, cache: PipelineCache, timings: dict[str, float]) -> Promised:
        """Begin to decode; the chunk before this one is decoded then."""
        if self._last is not None:
            self._last.decoded.result()
        input, phases, self._phases = cache.pending.get("input"), self._phases, []

        def work() -> Decoded:
            begin = self._lane.now()
            pixels = self.pipeline.decode(latent, cache, input) if self.decodes else latent[:, :3, :0]
            frames, end = to_uint8(pixels), self._lane.now()
            for seconds, phase, *moments in (*phases, (timings, "decode", begin, end)):
                seconds[phase] = self._lane.seconds(*moments)
            return Decoded(frames if self.batched else frames[0], latent.cpu())

        return self._lane.start(work, (latent, input, cache.decoder))

    def flush(self) -> None:
        """Commit the chunk handed out last, if that has not happened yet."""
        if self._failed is not None:
            raise self._failed
        if self._cache is not None and self._cache.pending and self._last is not None:
            with self._timed(self._last.timings, "commit"):
                self.pipeline.finalize(self._last.index, self._cache)

    def set_prompt(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | None = None,
        *,
        policy: Literal["keep", "recache", "reset"] | None = None,
    ) -> None:
        """From the next chunk on, show ``prompt``.

        Args:
            prompt: one for the whole batch, or one per sample.
            policy: what becomes of the context. ``keep``: it stays, made under the old prompt. ``recache``: it is
                made anew from the same latents under the new prompt, so that it does not hold the new one back.
                ``reset``: it is emptied, a cut. The model's own (``prompt_policy``) by default.

        Raises:
            ValueError: an unknown policy, or as many prompts as samples were not given; nothing has changed.
        """
        transformer = self.pipeline.config.diffusion_model.transformer
        if not transformer.takes_text:
            raise ValueError(f"{self.pipeline.config.name} takes no prompt")
        policy = policy or transformer.prompt_policy
        if policy not in ("keep", "recache", "reset"):
            raise ValueError(f"policy is {policy!r}; expected keep, recache or reset")
        if policy == "recache" and not self.pipeline.diffusion_model.transformer.can_recommit:
            raise ValueError(f"{self.pipeline.config.name} cannot make its context anew; use policy keep or reset")
        batch = self.cache.layout.batch
        prompts = [prompt] * batch if isinstance(prompt, str) else list(prompt)
        if len(prompts) != batch:
            raise ValueError(f"{len(prompts)} prompts were given; this rollout has {batch} samples")
        fresh = self.pipeline.encode_prompts(prompts, negative_prompt).to_dict()
        self.flush()
        old, model = self.cache.conditions, self.pipeline.diffusion_model
        # A given first frame belongs to what a reset leaves behind.
        conditions = type(old).from_dict(fresh if policy == "reset" else old.to_dict() | fresh)
        with torch.no_grad():
            if policy == "reset":
                model.reset(self.cache, conditions)
            else:
                model.set_conditions(self.cache, conditions)
            if policy == "recache":
                model.recache(self.cache)
        if self.observer is not None:
            self.observer.prompted(self.cache, prompts, policy)

    def set_loras(self, weights: Mapping[str, float]) -> None:
        """From the next chunk on, these LoRAs and no others, with these weights; other rollouts keep theirs.

        What was generated stays in the context. Names are those of ``pipeline.loras.load``.

        Raises:
            ValueError: a name is not loaded, or a weight is not finite; the rollout goes on as it was.
        """
        weights = self.pipeline.loras.check(weights)
        self.flush()
        self.cache.loras = weights
        with torch.no_grad():  # the text's keys and values are weights' work too
            self.pipeline.diffusion_model.set_conditions(self.cache, self.cache.conditions)
        if self.observer is not None:
            self.observer.set_loras(self.cache)

    def set_control(self, control: Any) -> None:
        """From the next chunk on, hold ``control`` for every frame, until it is set again.

        Raises:
            ControlError: the model does not take it; nothing has changed.
        """
        control = takes(self.pipeline).validate(control)
        self.flush()
        batch = self.cache.layout.batch
        row = lambda start, stop: [control] * (stop - start)  # noqa: E731
        self._control = (lambda start, stop: [row(start, stop)] * batch) if self.batched else row

    def save(self, path: str | Path) -> None:
        """Write the state at this chunk boundary to ``path`` (safetensors)."""
        from flashdreams.infra.snapshot import save

        self.flush()
        if self._last is not None:
            self._last.decoded.result()  # the decoder's state is saved too
        save(self, Path(path))

    def close(self) -> None:
        """Free the rollout's memory; what it recorded is complete."""
        if self._record is not None:
            self._record.close()
        self._cache = None
        self._last = None

    def __enter__(self) -> Rollout:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _controls(self, stop: int) -> list[list[Control | None]]:
        """Per sample one control for each frame from the next one on; the source is asked for those not known yet.

        Raises:
            ControlError: one that the model does not take; nothing has changed.
        """
        control, batch, start = self._control, len(self._ahead), self.frame + len(self._ahead[0])
        rows: Sequence[Any]
        if control is None:
            rows = [[]] * batch
        elif callable(control):
            given: Any = control(start, stop)
            rows = given if self.batched else [given]
        else:
            rows = [row[start:stop] for row in (control if self.batched else [control])]
        if len(rows) != batch:
            raise ValueError(f"controls were given for {len(rows)} samples; this rollout has {batch}")
        if any(len(row) > stop - start for row in rows):
            raise ValueError(f"controls were given for {max(map(len, rows))} frames; {stop - start} were asked for")
        missing = [None] * (stop - start)
        return [
            [*ahead, *(self._valid(control, start + i) for i, control in enumerate(row)), *missing[len(row) :]]
            for ahead, row in zip(self._ahead, rows, strict=True)
        ]

    def _valid(self, control: Any, frame: int) -> Control | None:
        try:
            return None if control is None else takes(self.pipeline).validate(control)
        except ControlError as error:
            raise ControlError(f"frame {frame}: {error}") from None

    @contextmanager
    def _timed(self, timings: dict[str, float], phase: str) -> Generator[None]:
        """Seconds of a ``with`` block, the device's work included."""
        begin = self._lane.now()
        yield
        end = self._lane.now()
        if self.pipeline.decode_lane is None:
            timings[phase] = self._lane.seconds(begin, end)
        else:  # told when it is known, which nothing waits for
            self._phases.append((timings, phase, begin, end))


def takes(pipeline: StreamInferencePipeline) -> ControlSpec:
    """Which controls the model takes; an error where it takes none."""
    encoder = pipeline.config.encoder
    if encoder is None or not encoder.takes:
        raise ControlError(f"{pipeline.config.name} takes no controls")
    return encoder.takes


def record_controls(pipeline: StreamInferencePipeline, path: str | Path | None, batch: int) -> ControlWriter | None:
    """What writes the controls of a rollout to ``path``, if one is given."""
    if path is None:
        return None
    if batch != 1:
        raise ValueError(f"a file holds the controls of one sample; this rollout has {batch}: leave save_control out")
    config = pipeline.config
    return ControlWriter(path, fps=config.fps, model=config.name, takes=takes(pipeline))


def to_uint8(video: Tensor) -> Tensor:
    """Video ``[B, 3, T, H, W]`` in [-1, 1] -> uint8 ``[B, T, H, W, 3]``, rounded, on the CPU."""
    return levels_of(video).cpu()


def levels_of(video: Tensor) -> Tensor:
    """:func:`to_uint8` on the video's own device. One copy is made, which is worked on in place."""
    levels = video.to(torch.float32, copy=True).clamp_(-1, 1).add_(1).mul_(127.5).round_()
    return levels.to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()


def start_rollout(
    pipeline: StreamInferencePipeline,
    prompt: str | Sequence[str],
    *,
    num_chunk: int | None,
    num_frames: int | None,
    image: Tensor | None,
    last_image: Tensor | None,
    clip: Tensor | None,
    initial_latents: Tensor | None,
    control: ControlSource,
    save_control: str | Path | None,
    conditions: Any,
    height: int | None,
    width: int | None,
    **options: Any,
) -> Rollout:
    """Check the request, make its cache, and wrap it. See :meth:`StreamInferencePipeline.rollout`."""
    if num_chunk is not None and num_chunk < 1:
        raise ValueError(f"num_chunk is {num_chunk}; expected 1 or more, or None for a rollout without end")
    if control is not None:
        understood = takes(pipeline)
        if isinstance(control, str):
            raise ValueError(
                f"control is the text {control[:40]!r}; expected one control per frame, or a function that gives them: "
                f"set_control holds one, read_controls reads such a text. This model {understood.describe()}"
            )
    config, transformer = pipeline.config, pipeline.config.diffusion_model.transformer
    if num_frames is not None and (num_chunk is not None or num_frames < 1):
        raise ValueError(f"num_frames is {num_frames}; expected 1 or more, and no num_chunk beside it")
    length = transformer.len_t
    if transformer.bidirectional:
        if num_chunk not in (None, 1):
            raise ValueError(f"{config.name} makes a whole clip as one chunk, not {num_chunk}; give num_frames")
        length, num_chunk = length if num_frames is None else config.latent_frames(num_frames), 1
    if initial_latents is not None and (image is not None or config.image_use != "context"):
        raise ValueError(f"initial_latents are the context to begin with; {config.name} takes an image or has one")
    if not transformer.takes_text and conditions is None and any([prompt] if isinstance(prompt, str) else prompt):
        raise ValueError(f"{config.name} takes no prompt, but got {prompt!r}")
    if config.image_use == "concat" and image is None and conditions is None:
        raise ValueError(f"{config.name} makes a video from an image; give one (image=)")
    batched = not isinstance(prompt, str) if conditions is None else True
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    slots: dict[str, Tensor] = {}
    if image is not None:
        size = height or config.height, width or config.width
        with torch.no_grad():
            whole = length if transformer.bidirectional else None
            slots, initial_latents = given_frames(pipeline, image, last_image, *size, whole)
    elif last_image is not None:
        raise ValueError("a last frame alone says too little; give the first one too (image)")
    if clip is not None:
        stamped = config.image_use == "stamp" and transformer.max_given_frames > 1
        if initial_latents is not None or slots or not (stamped or config.image_use == "context"):
            raise ValueError(f"a clip is the context to begin with; {config.name} takes an image or has one")
        known = pipeline.encode_video(from_uint8(torch.as_tensor(clip)).transpose(0, 1)[None])
        slots, initial_latents = ({"image_latent": known}, None) if stamped else ({}, known)
    if initial_latents is not None and transformer.bidirectional:
        raise ValueError(f"{config.name} makes a whole clip from text alone; it takes no image and no clip")
    cache = pipeline.initialize_cache(
        prompts, conditions=conditions, initial_latents=initial_latents, height=height, width=width, slots=slots,
        latent_frames=length if transformer.bidirectional else None, **options,
    )  # fmt: skip
    if num_frames is not None and not transformer.bidirectional:
        plan = cache.layout.plan
        num_chunk = chunks_for(num_frames, lambda chunks: config.frames_of(plan.frames_until(chunks)))
    record = record_controls(pipeline, save_control, cache.layout.batch)
    return Rollout(pipeline, cache, batched=batched, num_chunk=num_chunk, control=control, record=record)
