// The WebSocket of one session: its first message, pictures, and coming back when the connection breaks.

const SUBPROTOCOL = "flashdreams.v1";
const TYPES = ["", "image/jpeg", "image/webp", "image/png"];
const HEADER_BYTES = 32;
const PATIENCE = 9000; // ms; a server that did not notice the break yet needs up to 5 s to let somebody else in

/** What a binary message holds (flashdreams/serving/wire.py), or nothing if it is none. */
export function unpack(buffer) {
  const view = new DataView(buffer);
  if (buffer.byteLength < HEADER_BYTES || view.getUint16(0) !== 0x4644 || view.getUint8(2) !== 1) return null;
  return {
    generation: view.getUint32(8, true), frame: view.getUint32(16, true), pts: 1000 * view.getFloat64(20, true),
    blob: new Blob([new Uint8Array(buffer, HEADER_BYTES)], { type: TYPES[view.getUint8(3)] }),
  };
}

/** A token as a WebSocket subprotocol may hold it: pages cannot set headers, and addresses are logged. */
function bearer(token) {
  const bytes = String.fromCharCode(...new TextEncoder().encode(token));
  return "bearer." + btoa(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

export class Connection {
  #socket = null;
  #session = null;
  #over = false;
  #broken = 0;

  /**
   * @param view encoding and quality of the pictures
   * @param on what to call: message(object), picture(object), refused(code, sentence), broken(), gone(sentence)
   */
  constructor(token, view, on) {
    Object.assign(this, { token, view, on });
  }

  /** Connect, and begin a session with these fields. */
  create(fields) {
    this.#open({ type: "create", v: 1, ...this.view, ...fields });
  }

  #open(first) {
    const address = `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/v1/session`;
    const socket = new WebSocket(address, this.token ? [SUBPROTOCOL, bearer(this.token)] : [SUBPROTOCOL]);
    socket.binaryType = "arraybuffer";
    socket.onmessage = ({ data }) => {
      if (socket !== this.#socket) return;
      if (typeof data === "string") this.#take(JSON.parse(data), first);
      else this.on.picture(unpack(data));
    };
    socket.onclose = () => socket === this.#socket && this.#closed();
    this.#socket = socket;
  }

  #take(message, first) {
    if (message.type === "error" && !this.#session) {
      this.#over = true;
      this.on.refused(message.code, message.message);
      return;
    }
    if (message.type === "error" && this.#broken) {
      this.#over = message.code !== "attached"; // or the server has yet to notice that the old connection is gone
      if (this.#over) this.on.gone("The connection was lost for too long, and the session has ended.");
      return;
    }
    if (message.type === "created") {
      this.#session = message.session;
      this.#broken = 0;
    }
    this.#over ||= message.type === "closed";
    this.on.message(message);
    if (message.type === "hello") this.#socket.send(JSON.stringify(first));
  }

  #closed() {
    if (this.#over) return;
    if (!this.#session) {
      this.#over = true;
      this.on.refused("lost", "The server does not answer.");
      return;
    }
    if (!this.#broken) {
      this.#broken = Date.now();
      this.on.broken();
    }
    if (Date.now() - this.#broken > PATIENCE) {
      this.#over = true;
      this.on.gone("The server does not answer any more. It may have been stopped.");
      return;
    }
    setTimeout(() => this.#open({ type: "attach", v: 1, ...this.view, session: this.#session }), 400);
  }

  /** Send a message; what is said while there is no connection is lost. */
  say(message) {
    if (this.#session && this.#socket.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(message));
  }
}
