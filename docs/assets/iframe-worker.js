// The theme searches in a worker, and browsers start none for pages that were opened as files: there an iframe does its
// work. Loaded by the theme's offline plugin, which would fetch a program of this name from the network.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inner = this.frame.contentWindow;
      inner.document.open(); // keeps this document: some browsers load an empty one later
      inner.document.write("<!doctype html><body></body>");
      inner.document.close();
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.started = new Promise((resolve, reject) => {
        const script = inner.document.createElement("script");
        script.onload = resolve;
        script.onerror = reject;
        script.src = url;
        inner.document.body.appendChild(script);
      });
    }

    postMessage(data) {
      const inner = this.frame.contentWindow;
      this.started.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
