// Browsers allow no workers in pages opened from disk. There the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      const tell = (target, data) => target.dispatchEvent(new MessageEvent("message", { data }));
      inner.postMessage = (data) => tell(this, data); // what the worker's code calls
      const loaded = new Promise((resolve) => {
        const script = inner.document.createElement("script");
        script.onload = resolve;
        script.src = url;
        inner.document.body.append(script);
      });
      this.postMessage = (data) => loaded.then(() => tell(inner, data));
    }
    terminate() {}
  };
}
