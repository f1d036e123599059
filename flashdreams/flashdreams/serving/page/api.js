// The HTTP side of the server.

/** An answer that is an error: `status` 0 means that none came. */
export class Failure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Api {
  token = "";

  async #ask(path, options = {}) {
    const headers = this.token ? { authorization: `Bearer ${this.token}` } : {};
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch {
      throw new Failure(0, "The server does not answer.");
    }
    if (response.ok) return response;
    const body = await response.json().catch(() => null);
    throw new Failure(response.status, body?.error?.message ?? `The server answers with error ${response.status}.`);
  }

  /** What is served, and what it takes. */
  async model() {
    return (await (await this.#ask("/v1/models")).json()).data[0];
  }

  /** Nothing once clients are served; before that, why not yet. */
  async waitsFor() {
    const response = await fetch("/readyz", { cache: "no-store" }).catch(() => null);
    if (!response) return "the server does not answer";
    return response.ok ? null : (await response.text()).trim();
  }

  /** Send an image file; resolves to its name and what the server remarks. */
  async upload(file) {
    return (await this.#ask("/v1/images", { method: "POST", body: file })).json();
  }

  /** The mp4 of a session that has ended, once it is finished. */
  async video(id) {
    const path = `/v1/videos/${encodeURIComponent(id)}`;
    for (;;) {
      const { status, error } = await (await this.#ask(path)).json();
      if (status === "failed") throw new Failure(0, error?.message ?? "The video could not be written.");
      if (status === "completed") return (await this.#ask(`${path}/content`)).blob();
      await new Promise((done) => setTimeout(done, 200));
    }
  }
}
