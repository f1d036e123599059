// One session: what is said to the server and what it answers, whichever way the pictures come.

import { Connection } from "./connection.js";
import { Peer } from "./peer.js";
import { Player } from "./player.js";

const VIEW = { encoding: "jpeg", quality: 92 };
const SILENCE = 3000; // ms without a frame after which pictures come over the WebSocket again
const SPAN = 2000; // ms over which frames are counted

export class Session {
  #connection;
  #player;
  #peer = null;
  #shown = [];
  #lastChunk = 0;
  #lastFrame = 0;
  #begun = performance.now();
  #looked = 0;
  #watch;

  figures = { transport: "WebSocket" };

  /** @param on what to call: created, message, broken, refused(code, sentence), ended(reason, sentence) */
  constructor({ canvas, video, token, create, on }) {
    this.video = video;
    this.on = on;
    this.#player = new Player(canvas, () => this.figures.transport === "WebSocket" && this.#count());
    this.#connection = new Connection(token, VIEW, {
      message: (message) => this.#take(message),
      picture: (picture) => this.#player.push(picture),
      refused: (code, sentence) => {
        this.#stop();
        on.refused(code, sentence);
      },
      broken: () => {
        this.#hangUp();
        on.broken();
      },
      gone: (sentence) => {
        this.#stop();
        on.ended("lost", sentence);
      },
    });
    this.#connection.create(create);
    this.#watch = setInterval(() => this.#look(), 500);
  }

  /** Steer: by the data channel where there is one. */
  control(control) {
    const message = { type: "control", control };
    if (!(this.#peer?.chosen && this.#peer.say(message))) this.#connection.say(message);
  }

  say(message) {
    this.#connection.say(message);
  }

  #take(message) {
    switch (message.type) {
      case "hello":
        this.hello = message;
        return;
      case "created":
        this.#player.begin(message.generation);
        Object.assign(this.figures, { generation: message.generation, seed: message.seed });
        this.on.created(message);
        this.#offer();
        return;
      case "reset":
        this.#player.begin(message.generation);
        Object.assign(this.figures, { generation: message.generation, seed: message.seed });
        break;
      case "chunk":
        this.#lastChunk = performance.now();
        this.figures.chunk = 1000 * Object.values(message.seconds).reduce((sum, value) => sum + value, 0);
        this.figures.queue = message.waiting;
        break;
      case "webrtc_answer":
        this.#peer?.answer(message.sdp).catch(() => this.#hangUp());
        return;
      case "closed":
        this.#stop();
        this.on.ended(message.reason, message.message);
        return;
    }
    if (message.code === "webrtc" || message.code === "webrtc_ended") this.#hangUp();
    else this.on.message(message);
  }

  #offer() {
    const forced = new URLSearchParams(location.search).get("transport") === "websocket";
    if (forced || !this.hello.webrtc || !window.RTCPeerConnection) return;
    try {
      this.#peer = new Peer(this.video, this.hello.ice_servers ?? [], {
        offer: (sdp) => this.say({ type: "webrtc_offer", sdp }),
        open: () => this.#choose(),
        frame: () => this.#presented(),
        failed: () => this.#hangUp(),
      });
      this.#peer.start().catch(() => this.#hangUp());
    } catch {
      this.#hangUp();
    }
  }

  /** Ask for the pictures by the track. The canvas shows what still came over the WebSocket until they are there. */
  #choose() {
    this.#peer.chosen = true;
    this.#lastFrame = performance.now();
    this.say({ type: "video", over: "webrtc" });
  }

  #presented() {
    if (this.figures.transport !== "WebRTC") this.#show("WebRTC");
    this.#count();
  }

  /** Back to pictures over the WebSocket. */
  #hangUp() {
    if (!this.#peer) return;
    if (this.#peer.chosen) {
      this.say({ type: "video", over: "websocket" });
      this.#player.keep(this.video);
    }
    this.#peer.close();
    this.#peer = null;
    this.#show("WebSocket");
  }

  #show(transport) {
    this.figures.transport = transport;
    this.video.classList.toggle("shown", transport === "WebRTC");
  }

  #count() {
    this.#lastFrame = performance.now();
    this.figures.firstFrame ??= this.#lastFrame - this.#begun;
    this.#shown.push(this.#lastFrame);
  }

  #look() {
    const now = performance.now();
    while (this.#shown.length && this.#shown[0] < now - SPAN) this.#shown.shift();
    this.figures.fps = (1000 * this.#shown.length) / SPAN;
    this.figures.waiting = this.#player.waiting;
    if (document.hidden || now - this.#looked > SILENCE) this.#lastFrame = now; // nothing is presented to nobody
    this.#looked = now;
    const silent = now - this.#lastFrame > SILENCE && now - this.#lastChunk < SILENCE / 2;
    if (this.#peer?.chosen && silent) this.#hangUp();
  }

  #stop() {
    clearInterval(this.#watch);
    this.#hangUp();
  }
}
