// The WebSocket that the live view is fed by: opens, authenticates, reopens, and says how it is doing.

import { savedKey } from "./access.js";

const RETRY_MS = [500, 1000, 2000, 4000];
const WRONG_KEY = 4401;
const SILENCE_MS = 4000; // a server that is there says something twice a second

export class Feed {
  #socket = null;
  #retries = 0;
  #watched = null;
  #silence = 0;
  #heard = null; // when the server last said something

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
    this.#expectNews();
    socket.onmessage = ({ data }) => {
      this.#retries = 0;
      this.#heard = new Date();
      this.#expectNews();
      this.onState("good", "live");
      this.onUpdate(JSON.parse(data));
    };
    socket.onclose = ({ code }) => {
      if (this.#socket !== socket) return;
      if (code !== WRONG_KEY) return this.#lose();
      this.#leave();
      this.onState("bad", "key needed");
    };
  }

  #expectNews() {
    clearTimeout(this.#silence);
    this.#silence = setTimeout(() => this.#lose(), SILENCE_MS);
  }

  #lose() {
    this.#leave();
    this.onState("", this.#heard ? `lost since ${this.#heard.toLocaleTimeString("en-GB")}` : "no answer yet");
    setTimeout(() => this.open(), RETRY_MS[Math.min(this.#retries++, RETRY_MS.length - 1)]);
  }

  #leave() {
    clearTimeout(this.#silence);
    const socket = this.#socket;
    this.#socket = null;
    if (socket?.readyState === WebSocket.CONNECTING) socket.onopen = () => socket.close();
    else socket?.close();
  }

  // A hidden page is not fed: the server does no work for it.
  close() {
    this.#leave();
    this.onState("", "paused");
  }

  watch(session) {
    this.#watched = session;
    if (this.#socket?.readyState === WebSocket.OPEN) {
      this.#socket.send(JSON.stringify({ watch: session }));
    }
  }
}
