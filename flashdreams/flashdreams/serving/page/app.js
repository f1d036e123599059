// The page: what a person sees and presses, around one session at a time.

import { Api, Failure } from "./api.js";
import { Controls } from "./controls.js";
import { Session } from "./session.js";

const $ = (id) => document.getElementById(id);
const STATES = {
  loading: "Loading", locked: "Locked", idle: "Ready", starting: "Starting", live: "Live", paused: "Paused",
  broken: "Reconnecting", ended: "Ended",
};
const ENDINGS = {
  closed: "The session has ended.",
  idle: "The session has ended, because nobody seemed to be there.",
  lost: "The connection was lost for too long, and the session has ended.",
  shutdown: "The server was stopped.",
};
const SMALL = 256 * 256; // pixels, up to which a picture is enlarged pixel by pixel
const MAX_SEED = 2n ** 64n - 1n;
const PRESENCE = 20_000; // ms
const api = new Api();
let model = null;
let session = null;
let controls = null;
let image = null;
let recorded = null; // name and seed of the video that the session left
let next = null; // what to do once the present session has ended
let state = "loading";

function enter(name, message = "") {
  state = document.body.dataset.state = name;
  $("status").textContent = STATES[name];
  $("message").textContent = message;
  const running = ["live", "paused", "broken"].includes(name);
  for (const id of ["pause", "restart", "renew", "end"]) $(id).disabled = !running;
  $("pause").textContent = name === "paused" ? "Go on" : "Pause";
  $("unlock").hidden = name !== "locked";
  $("start").hidden = !["idle", "ended"].includes(name);
  $("start").textContent = name === "ended" ? "New session" : "Start";
  $("save-after").hidden = name !== "ended" || !recorded;
  $("show").disabled = name === "broken" || (!running && $("start").hidden);
  $("show").textContent = running ? "Change" : "Start";
}

function notice(text) {
  $("notice").textContent = text;
}

async function boot() {
  enter("loading");
  for (;;) {
    try {
      model = await api.model();
      break;
    } catch (failure) {
      if (failure.status === 401) {
        enter("locked", api.token ? "That is not the token of this server." : "This server asks for a token.");
        $("token").focus();
        return;
      }
      enter("loading", failure.message);
    }
    await sleep(2000);
  }
  describe();
  for (let reason; (reason = await api.waitsFor()); await sleep(1000)) enter("loading", sentence(reason));
  enter("idle", sentence(model.description));
}

const sleep = (time) => new Promise((done) => setTimeout(done, time));
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?…]$/.test(text) ? "" : ".");

/** Show what this model is and takes. */
function describe() {
  document.title = `${model.id} · flashdreams`;
  $("model").textContent = model.id;
  $("model").title = model.description;
  $("stage").style.setProperty("--width", model.width);
  $("stage").style.setProperty("--height", model.height);
  $("stage").classList.toggle("crisp", model.width * model.height <= SMALL);
  $("say").hidden = !model.takes_prompt;
  $("prompt").value ||= model.default_prompt;
  $("first").hidden = !model.takes_image;
  $("next").open = model.needs_image;
  $("suggestions").replaceChildren(...model.suggestions.map(suggestion));
  $("steer").hidden = !Controls.any(model.takes);
  $("pads").replaceChildren();
  controls = new Controls(model.takes, (control) => session?.control(control), {
    pads: $("pads"), stage: $("stage"), hint: $("hint"),
  });
  document.addEventListener("visibilitychange", () => document.hidden && controls.releaseAll());
}

function suggestion(text) {
  const item = document.createElement("li");
  const button = document.createElement("button");
  button.textContent = text;
  button.addEventListener("click", () => {
    $("prompt").value = text;
    if (["live", "paused"].includes(state)) ask();
  });
  item.append(button);
  return item;
}

/** The seed that was typed, as text, because numbers of JavaScript end at 2**53; null if none was. */
function seed() {
  const text = $("seed").value.trim();
  if (!text) return null;
  if (/^(0|[1-9]\d{0,19})$/.test(text) && BigInt(text) <= MAX_SEED) return text;
  $("next").open = true;
  $("seed").focus();
  throw new Failure(0, `The seed is “${text.slice(0, 30)}”; it has to be a whole number from 0 to ${MAX_SEED}.`);
}

async function start() {
  notice("");
  try {
    const create = { record: $("record").checked, seed: seed() };
    if (model.takes_prompt) create.prompt = $("prompt").value;
    if (model.needs_image && !image) {
      $("next").open = true;
      throw new Failure(0, "This model makes a video from an image; choose one first.");
    }
    recorded = null;
    enter("starting");
    if (image) {
      const { id, notices } = await api.upload(image);
      create.image = id;
      if (notices.length) notice(notices.map(sentence).join(" "));
    }
    session = new Session({ canvas: $("canvas"), video: $("video"), token: api.token, create, on: events });
    $("stage").focus();
  } catch (failure) {
    if (state === "starting") enter("idle", sentence(failure.message));
    else notice(failure.message);
  }
}

const events = {
  created({ video, seed, paused }) {
    recorded = video && { id: video, name: `${model.id}-${seed}.mp4` };
    enter(paused ? "paused" : "live");
    controls.repeat();
  },
  broken() {
    enter("broken", "The connection broke. Trying to come back…");
  },
  refused(code, message) {
    session = null;
    if (code === "storage" && $("record").checked) {
      $("record").checked = false;
      start();
      notice("The server has no room to keep a video; this session is not recorded.");
    } else enter("idle", code === "busy" ? `The server is busy: ${message}.` : sentence(message));
  },
  ended(reason, message) {
    session = null;
    enter("ended", ENDINGS[reason] ?? sentence(message || `The session has ended (${reason})`));
    next?.();
    next = null;
  },
  message(message) {
    if (message.type === "paused") enter("paused");
    else if (message.type === "resumed") enter("live");
    else if (message.type === "error" || message.type === "notice") notice(sentence(message.message));
    else if (message.type === "finished") notice("The video is complete.");
    else if (message.type === "chunk" && message.refused?.length) notice(sentence(String(message.refused[0])));
  },
};

/** Show another prompt from the next chunk on; without a session, begin one. */
function ask() {
  if (!["live", "paused"].includes(state)) {
    if (!$("start").hidden) start();
    return;
  }
  session.say({ type: "prompt", prompt: $("prompt").value });
  notice("");
  $("stage").focus();
}

function end(then = null) {
  next = then;
  session?.say({ type: "close" });
}

async function save() {
  const { id, name } = recorded;
  $("save-after").disabled = true;
  notice("The video is being finished…");
  try {
    const address = URL.createObjectURL(await api.video(id));
    const link = Object.assign(document.createElement("a"), { href: address, download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
    notice(`Saved as ${name}.`);
  } catch (failure) {
    notice(failure.message);
  }
  $("save-after").disabled = false;
}

/** The next session begins with this file; with none of it if it is null. */
function choose(file) {
  URL.revokeObjectURL($("preview").src);
  image = file;
  $("image-chosen").hidden = !file;
  if (!file) {
    $("image").value = "";
    return;
  }
  $("preview").src = URL.createObjectURL(file);
  $("next").open = true;
  notice(session ? "The next session begins with this image." : "");
}

function figures() {
  const { fps, chunk, firstFrame, queue, waiting, transport, generation, seed } = session?.figures ?? {};
  if (transport === undefined) return;
  const text = (value, digits, unit) => (value === undefined ? "–" : `${value.toFixed(digits)} ${unit}`);
  $("fps").textContent = text(fps, 1, "FPS");
  $("chunk").textContent = text(chunk, 0, "ms");
  $("first-frame").textContent = text(firstFrame, 0, "ms");
  $("queue").textContent = text(queue, 0, "chunks");
  $("buffer").textContent = text(waiting, 0, "frames");
  $("transport").textContent = transport;
  $("generation").textContent = generation ?? "–";
  $("seed-used").textContent = seed ?? "–";
}

$("start").addEventListener("click", start);
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask();
});
$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  api.token = $("token").value.trim();
  $("token").value = "";
  boot();
});
$("pause").addEventListener("click", () => session?.say({ type: state === "paused" ? "resume" : "pause" }));
$("restart").addEventListener("click", () => {
  try {
    session?.say({ type: "reset", seed: seed() });
    notice("");
  } catch (failure) {
    notice(failure.message);
  }
});
$("renew").addEventListener("click", () => end(start));
$("end").addEventListener("click", () => end());
$("save-after").addEventListener("click", save);
$("image").addEventListener("change", () => choose($("image").files[0] ?? null));
$("forget").addEventListener("click", () => choose(null));
for (const kind of ["dragover", "dragleave", "drop"]) {
  addEventListener(kind, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dragging", kind === "dragover" && Boolean(model?.takes_image));
    const file = kind === "drop" && model?.takes_image && event.dataTransfer.files[0];
    if (file) choose(file);
  });
}

let present = 0;
for (const kind of ["pointermove", "pointerdown", "keydown", "wheel"]) {
  addEventListener(kind, () => {
    if (!session || performance.now() - present < PRESENCE) return;
    present = performance.now();
    session.say({ type: "ping" }); // somebody is there: the server lets go those who say nothing
  }, { passive: true });
}
addEventListener("pagehide", () => session?.say({ type: "close" }));
setInterval(figures, 250);
boot();
