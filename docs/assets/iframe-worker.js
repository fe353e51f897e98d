// Browsers start no worker for a page on disk. There the worker of the search runs in an empty frame. Material for MkDocs
// otherwise loads such a script from a server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #inner;
    #loaded;

    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.#inner = frame.contentWindow;
      this.#inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.#inner.importScripts = (...urls) => Promise.all(urls.map((one) => this.#script(one)));
      this.#loaded = this.#script(url);
    }

    #script(url) {
      const script = this.#inner.document.createElement("script");
      return new Promise((onload, onerror) => {
        Object.assign(script, { src: String(url), onload, onerror });
        this.#inner.document.body.append(script);
      });
    }

    postMessage(data) {
      this.#loaded.then(() => this.#inner.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.#inner.frameElement.remove();
    }
  };
}
