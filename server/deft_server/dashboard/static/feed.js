// The WebSocket that the live view is fed by: opens, authenticates, reopens, and says how it is doing.

import { savedKey } from "./access.js";

const RETRY_MS = [500, 1000, 2000, 4000];
const WRONG_KEY = 4401;

export class Feed {
  #socket = null;
  #retries = 0;
  #watched = null;

  constructor({ onUpdate, onState }) {
    this.onUpdate = onUpdate;
    this.onState = onState;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
  }

  open() {
    if (this.#socket || document.hidden) return;
    const address = new URL("/dashboard/feed", location.href);
    address.protocol = address.protocol.replace("http", "ws");
    const socket = (this.#socket = new WebSocket(address));
    socket.onopen = () => {
      socket.send(JSON.stringify({ key: savedKey(), watch: this.#watched }));
    };
    socket.onmessage = ({ data }) => {
      this.#retries = 0;
      this.onState("good", "live");
      this.onUpdate(JSON.parse(data));
    };
    socket.onclose = ({ code }) => {
      if (this.#socket !== socket) return;
      this.#socket = null;
      if (code === WRONG_KEY) {
        this.onState("bad", "key needed");
        return;
      }
      this.onState("warn", "reconnecting");
      const wait = RETRY_MS[Math.min(this.#retries++, RETRY_MS.length - 1)];
      setTimeout(() => this.open(), wait);
    };
  }

  // A hidden page is not fed: the server does no work for it.
  close() {
    const socket = this.#socket;
    this.#socket = null;
    if (socket?.readyState === WebSocket.CONNECTING) socket.onopen = () => socket.close();
    else socket?.close();
    this.onState("", "paused");
  }

  watch(session) {
    this.#watched = session;
    if (this.#socket?.readyState === WebSocket.OPEN) {
      this.#socket.send(JSON.stringify({ watch: session }));
    }
  }
}
