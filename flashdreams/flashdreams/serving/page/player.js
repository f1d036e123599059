// Pictures that come one by one, drawn at their moments in the video.

const MAX_WAITING = 96;
const WINDOW = 32; // pictures after which spare time is given back

export class Player {
  #context;
  #queue = [];
  #generation = 0;
  #offset = NaN; // from moments of the video to those of the page's clock, in ms
  #slack = Infinity;
  #arrived = 0;
  #asked = false;

  /** @param shown called with every picture that is drawn */
  constructor(canvas, shown) {
    this.canvas = canvas;
    this.shown = shown;
    this.#context = canvas.getContext("2d", { alpha: false });
  }

  get waiting() {
    return this.#queue.length;
  }

  /** Show nothing from before this generation any more. */
  begin(generation) {
    this.#generation = generation;
    this.#offset = NaN;
    for (const picture of this.#queue.splice(0)) picture.bitmap.close();
  }

  /** Take a picture (see unpack). */
  async push(picture) {
    if (!picture || document.hidden) return;
    const due = this.#due(picture);
    let bitmap;
    try {
      bitmap = await createImageBitmap(picture.blob);
    } catch {
      return; // a damaged picture is left out; the next is a moment away
    }
    if (picture.generation < this.#generation) {
      bitmap.close();
      return;
    }
    const place = this.#queue.findLastIndex((other) => other.frame < picture.frame) + 1;
    this.#queue.splice(place, 0, { ...picture, due, bitmap });
    if (this.#queue.length > MAX_WAITING) this.#queue.shift().bitmap.close();
    this.#tick();
  }

  /** When to draw it. A late one moves all that follow; time that none of the last ones needed is given back. */
  #due({ pts }) {
    const now = performance.now();
    if (!(pts + this.#offset >= now)) this.#offset = now - pts;
    this.#slack = Math.min(this.#slack, pts + this.#offset - now);
    if (++this.#arrived % WINDOW === 0) {
      this.#offset -= Math.max(0, this.#slack - 4);
      this.#slack = Infinity;
    }
    return pts + this.#offset;
  }

  #tick() {
    if (this.#asked || !this.#queue.length) return;
    this.#asked = true;
    requestAnimationFrame((now) => {
      this.#asked = false;
      let picture = null;
      while (this.#queue.length && this.#queue[0].due <= now + 4) {
        picture?.bitmap.close();
        picture = this.#queue.shift();
      }
      if (picture) this.#draw(picture);
      this.#tick();
    });
  }

  /** Go on showing what a video element shows. */
  keep(video) {
    if (video.videoWidth) this.#paint(video, video.videoWidth, video.videoHeight);
  }

  #draw({ bitmap, frame, generation }) {
    this.#paint(bitmap, bitmap.width, bitmap.height);
    bitmap.close();
    Object.assign(this.canvas.dataset, { frame, generation });
    this.shown();
  }

  #paint(source, width, height) {
    const { canvas } = this;
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    this.#context.drawImage(source, 0, 0);
  }
}
