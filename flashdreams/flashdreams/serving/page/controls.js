// What a person can do with a model, from what the model says it takes: keys, buttons for them, words, a number, the mouse.

const PADS = [["up", "left", "down", "right"], ["w", "a", "s", "d"], ["i", "j", "k", "l"]]; // up, left, down, right
const PLACES = ["up", "left", "down", "right"];
const ARROWS = ["↑", "←", "↓", "→"];
const MOUSE_EVERY = 33; // ms

/** A key's name as the server has it (core/controls/types.py). */
const nameOf = (key) => (key === " " ? "space" : key.toLowerCase().replace(/^arrow/, ""));

/** A key as it is printed on a keyboard. */
const printed = (key) => ARROWS[PLACES.indexOf(key)] ?? (key.length === 1 ? key.toUpperCase() : key);

const isTyping = (target) => target.closest?.("input, textarea, select") !== null;
const isPressable = (target) => target.closest?.("button, summary, a") !== null;

export class Controls {
  #takes;
  #send;
  #held = new Map(); // what is pressed (a key of the keyboard, a finger) to the name of the key it means
  #said = [];
  #moved = null;

  /**
   * @param takes what the model takes (hello.takes)
   * @param send called with every control
   */
  constructor(takes, send, { pads, stage, hint }) {
    this.#takes = takes;
    this.#send = send;
    const keys = takes.keys ?? {};
    if (takes.keys) {
      pads.append(...this.#makePads(keys));
      addEventListener("keydown", (event) => this.#keyDown(event));
      addEventListener("keyup", (event) => this.#release(event.code));
      addEventListener("blur", () => this.releaseAll());
      this.#follow(pads);
    }
    const known = new Set(["none", ...Object.values(keys)]);
    const words = (takes.words ?? []).filter((word) => !takes.keys || !known.has(word));
    if (words.length) pads.append(this.#makeWords(words));
    if (takes.number) pads.append(this.#makeNumber(...takes.number));
    if (takes.mouse || takes.buttons) this.#dragOn(stage);
    hint.textContent = [
      takes.keys && `Keys: ${Object.keys(keys).map(printed).join(" ")}`,
      takes.mouse && "Drag on the picture to look around.",
      takes.pose && "Programs can steer the camera with poses too.",
    ].filter(Boolean).join(". ");
  }

  /** Whether there is anything to show. */
  static any(takes) {
    return Boolean(takes.keys || takes.words || takes.number || takes.mouse || takes.buttons);
  }

  /** Say again what is held, to a session that has not heard it. */
  repeat() {
    if (this.#said.length) this.#send({ keys: this.#said });
  }

  releaseAll() {
    this.#held.clear();
    this.#tell();
  }

  #tell() {
    const keys = [...new Set(this.#held.values())];
    if (keys.join() === this.#said.join()) return;
    this.#said = keys;
    for (const button of document.querySelectorAll("[data-key]")) {
      const pressed = keys.some((key) => this.#takes.keys[key] === this.#takes.keys[button.dataset.key]);
      button.setAttribute("aria-pressed", pressed);
    }
    this.#send({ keys });
  }

  #press(source, key) {
    this.#held.delete(source); // the latest stands last
    this.#held.set(source, key);
    this.#tell();
  }

  #release(source) {
    if (this.#held.delete(source)) this.#tell();
  }

  #keyDown(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    if ((event.key === " " || event.key === "Enter") && isPressable(event.target)) {
      const { key } = event.target.dataset;
      if (key && !event.repeat) this.#press(event.code, key);
      return;
    }
    const asTyped = nameOf(event.key);
    const asPlaced = nameOf(event.code.replace(/^Key/, "")); // W A S D where other letters are printed there
    const key = [asTyped, asPlaced].find((name) => Object.hasOwn(this.#takes.keys, name));
    if (!key) return;
    event.preventDefault();
    if (!event.repeat) this.#press(event.code, key);
  }

  /** Fingers and mouse on the buttons; a finger that slides to another button presses that one. */
  #follow(pads) {
    const at = (event) => document.elementFromPoint(event.clientX, event.clientY)?.closest("[data-key]");
    pads.addEventListener("pointerdown", (event) => {
      const button = at(event);
      if (!button || event.button !== 0) return;
      pads.setPointerCapture(event.pointerId);
      this.#press(event.pointerId, button.dataset.key);
    });
    pads.addEventListener("pointermove", (event) => {
      const held = this.#held.get(event.pointerId);
      const key = held && at(event)?.dataset.key;
      if (key && key !== held) this.#press(event.pointerId, key);
    });
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
      pads.addEventListener(end, (event) => this.#release(event.pointerId));
    }
    pads.addEventListener("contextmenu", (event) => event.preventDefault());
  }

  /** A cross of four for each group of keys that does something of its own; the rest in a row. */
  #makePads(keys) {
    const made = new Set();
    const groups = PADS.filter((group) => {
      const isNew = group.every((key) => key in keys) && group.some((key) => !made.has(keys[key]));
      if (isNew) for (const key of group) made.add(keys[key]);
      return isNew;
    });
    groups.sort((a, b) => (b[0] === "w") - (a[0] === "w")); // for the left hand
    const crosses = groups.map((group) => {
      const cross = box("cross");
      for (const [i, key] of group.entries()) {
        const caption = keys[key] === PLACES[i] ? "" : keys[key];
        const button = keyButton(key, `${keys[key]}: key ${printed(key)}`, ARROWS[i], caption);
        button.classList.add(PLACES[i]);
        cross.append(button);
      }
      return cross;
    });
    const row = box("row");
    for (const [key, does] of Object.entries(keys)) {
      if (made.has(does)) continue;
      made.add(does);
      row.append(keyButton(key, `${does}: key ${printed(key)}`, does, key === does ? "" : printed(key)));
    }
    return row.childElementCount ? [...crosses, row] : crosses;
  }

  #makeWords(words) {
    const row = box("row");
    for (const word of words) {
      const button = document.createElement("button");
      button.textContent = word;
      button.addEventListener("click", () => this.#send({ word }));
      row.append(button);
    }
    return row;
  }

  #makeNumber(low, high) {
    const label = document.createElement("label");
    const input = document.createElement("input");
    Object.assign(input, { type: "range", min: low, max: high, step: "any", value: (low + high) / 2 });
    input.addEventListener("input", () => this.#send({ number: input.valueAsNumber }));
    label.append(`From ${low} to ${high}`, input);
    return label;
  }

  /** Motion while the picture is dragged, in widths and heights of it. */
  #dragOn(stage) {
    stage.classList.add("drag");
    const buttons = (event) =>
      ["left", "right", "middle"].filter((name, i) => event.buttons & (1 << i) && this.#takes.buttons?.includes(name));
    const flush = () => {
      this.#send({ mouse: this.#moved });
      this.#moved = null;
    };
    const move = (event) => {
      if (!this.#moved) setTimeout(flush, MOUSE_EVERY);
      const { dx = 0, dy = 0 } = this.#moved ?? {};
      const moved = event.type === "pointermove" && this.#takes.mouse;
      this.#moved = {
        dx: dx + (moved ? event.movementX / stage.clientWidth : 0),
        dy: dy + (moved ? event.movementY / stage.clientHeight : 0),
        buttons: buttons(event),
      };
    };
    stage.addEventListener("pointerdown", (event) => {
      if (event.target.closest("#overlay button, #overlay input")) return;
      stage.setPointerCapture(event.pointerId);
      move(event);
    });
    stage.addEventListener("pointermove", (event) => stage.hasPointerCapture(event.pointerId) && move(event));
    stage.addEventListener("pointerup", move);
  }
}

function box(name) {
  const element = document.createElement("div");
  element.className = name;
  return element;
}

function keyButton(key, label, text, caption) {
  const button = document.createElement("button");
  button.dataset.key = key;
  button.setAttribute("aria-label", label);
  button.setAttribute("aria-pressed", "false");
  button.append(text);
  if (caption) {
    const small = document.createElement("small");
    small.textContent = caption;
    button.append(small);
  }
  return button;
}
