// WebRTC: the video as a track, and a channel for what the person does. Signalling goes over the session's WebSocket.

const GATHERING = 1500; // ms

export class Peer {
  #connection;
  #channel;

  /** @param on what to call: offer(sdp), open() when both sides are ready, frame() when one is presented, failed() */
  constructor(video, iceServers, on) {
    this.video = video;
    this.on = on;
    this.#connection = new RTCPeerConnection({ iceServers });
    this.#connection.onconnectionstatechange = () => {
      if (["failed", "closed", "disconnected"].includes(this.#connection?.connectionState)) this.on.failed();
    };
    this.#connection.ontrack = ({ track, receiver }) => {
      if ("jitterBufferTarget" in receiver) receiver.jitterBufferTarget = 0; // what a person does shows at once
      video.srcObject = new MediaStream([track]);
      video.play().catch(() => {}); // where the browser plays nothing, no frame comes, and pictures go on
      this.#watch();
    };
  }

  async start() {
    const connection = this.#connection;
    connection.addTransceiver("video", { direction: "recvonly" });
    this.#channel = connection.createDataChannel("control");
    this.#channel.onopen = () => this.#connection && this.on.open();
    await connection.setLocalDescription();
    const gathered = new Promise((done) => {
      connection.onicegatheringstatechange = () => connection.iceGatheringState === "complete" && done();
    });
    if (connection.iceGatheringState !== "complete") {
      await Promise.race([gathered, new Promise((done) => setTimeout(done, GATHERING))]);
    }
    if (this.#connection) this.on.offer(connection.localDescription.sdp);
  }

  async answer(sdp) {
    await this.#connection?.setRemoteDescription({ type: "answer", sdp });
  }

  #watch() {
    this.video.requestVideoFrameCallback?.(() => {
      if (!this.#connection) return;
      this.on.frame();
      this.#watch();
    });
  }

  /** Send a message over the channel; false if it is not open. */
  say(message) {
    if (this.#channel?.readyState !== "open") return false;
    this.#channel.send(JSON.stringify(message));
    return true;
  }

  close() {
    const connection = this.#connection;
    this.#connection = null;
    connection?.close();
    this.video.srcObject = null;
  }
}
