"""The flags of ``flashdreams bench`` (no torch)."""

from __future__ import annotations

from pathlib import Path

from flashdreams.scripts.console import Parser

BENCHES = {
    "rollout": "A whole rollout of a Wan model of any size: network, and decoder.",
    "step": "One pass through blocks of a Wan network over a full window.",
    "vae": "Decoding of one chunk in the midst of a stream.",
    "attention": "Every attention backend there is here.",
    "load": "Loading of a model's weights.",
    "startup": "A fresh process, from its start to its first frames.",
}
DTYPES = ("float32", "bfloat16", "float16")


def parser_of(what: str, program: str) -> Parser:
    """The parser of one benchmark."""
    parser = Parser(prog=program, description=BENCHES[what])
    {
        "rollout": _rollout, "step": _step, "vae": _vae, "attention": _attention, "load": _slug, "startup": _startup,
    }[what](parser)  # fmt: skip
    common = parser.add_argument_group("measuring")
    common.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds that count [5]")
    common.add_argument("--warmup", type=int, default=1, metavar="N", help="rounds before, that do not [1]")
    common.add_argument("--threads", type=int, metavar="N", help="of the CPU [PyTorch's choice]")
    common.add_argument("--device", default="cpu", metavar="NAME", help="cpu (default), cuda, auto, ...")
    common.add_argument("--json", action="store_true", help="print JSON in place of the table")
    common.add_argument("--output", type=Path, metavar="FILE", help="write the JSON to this file too")
    common.add_argument("--compare", type=Path, metavar="FILE", help="an earlier --output to compare with")
    return parser


def _rollout(parser: Parser) -> None:
    _sizes(parser, dim=512, heads=4, ffn=2048, layers=8)
    _ints(parser, {"text_dim": (4096, "width of the text embeddings"), "freq_dim": (256, "of the time embedding")})
    _ints(
        parser, {"vae_dim": (96, "width of the decoder"), "latent_h": (30, "latent rows"), "latent_w": (52, "columns")}
    )
    _ints(parser, {"frames_per_chunk": (3, "latent frames"), "window": (21, "latent frames"), "sink": (0, "of those")})
    _ints(parser, {"steps": (4, "denoising steps"), "chunks": (4, "length")})
    parser.add_argument("--shift", type=float, default=5.0, metavar="X", help="of the noise levels [5]")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="native Wan keys under dit. and vae. [random]")
    parser.add_argument("--inputs", type=Path, metavar="FILE", help="text embeddings and noise [made from --seed]")
    parser.add_argument("--save-inputs", type=Path, metavar="FILE", help="write such a file")
    parser.add_argument("--dump", type=Path, metavar="FILE", help="write latents and frames (.safetensors)")
    parser.add_argument("--no-decode", action="store_true", help="no decoder")
    _how(parser)


def _step(parser: Parser) -> None:
    _sizes(parser, dim=1536, heads=12, ffn=8960, layers=1)
    _ints(parser, {"queries": (4680, "tokens of the chunk"), "keys": (10920, "tokens of the window")})
    _ints(parser, {"frames_per_chunk": (3, "latent frames that the queries are")})
    _how(parser)


def _vae(parser: Parser) -> None:
    parser.add_argument("slug", nargs="?", metavar="SLUG", help="the decoder of this model [Wan2.1's, random weights]")
    _ints(parser, {"vae_dim": (96, "width, without SLUG"), "latent_h": (8, "latent rows"), "latent_w": (8, "columns")})
    _ints(parser, {"frames_per_chunk": (3, "latent frames")})
    parser.add_argument("--channels-last", action="store_true", help="also with channels innermost in memory")
    _how(parser)


def _attention(parser: Parser) -> None:
    _ints(parser, {"queries": (4680, "tokens"), "keys": (10920, "tokens"), "heads": (12, ""), "head_dim": (128, "")})
    _numbers(parser)


def _slug(parser: Parser) -> None:
    parser.add_argument("slug", metavar="SLUG", help="the model (see `flashdreams list`)")


def _startup(parser: Parser) -> None:
    _slug(parser)
    parser.add_argument("--compile", action="store_true", help="with the blocks compiled, or taken from earlier runs")


def _sizes(parser: Parser, *, dim: int, heads: int, ffn: int, layers: int) -> None:
    _ints(parser, {"dim": (dim, "width"), "heads": (heads, ""), "ffn_dim": (ffn, "width of the feed-forward")})
    _ints(parser, {"layers": (layers, "blocks")})


def _ints(parser: Parser, flags: dict[str, tuple[int, str]]) -> None:
    for name, (default, text) in flags.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} [{default}]".strip())


def _numbers(parser: Parser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and activations [float32]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and inputs that are not given [0]")


def _how(parser: Parser) -> None:
    _numbers(parser)
    parser.add_argument("--eager", action="store_true", help="uncompiled only [both]")
    parser.add_argument("--compile", action="store_true", help="compiled only [both]")
