// Searches a built site as a page that was opened as a file does, with as much of a browser as that takes.
// node search_in_files.js SITE WORDS: prints the places that are found, as JSON.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, words] = process.argv.slice(2);

function inner(page) {
  const context = vm.createContext(Object.assign(new EventTarget(), { console, parent: page, MessageEvent }));
  context.self = vm.runInContext("globalThis", context);
  context.addEventListener = EventTarget.prototype.addEventListener.bind(context);
  context.dispatchEvent = EventTarget.prototype.dispatchEvent.bind(context);
  context.document = {
    open() {},
    write() {},
    close() {},
    createElement: () => ({}),
    querySelector: () => context.loaded,
    body: {
      appendChild(element) {
        context.loaded = element;
        vm.runInContext(fs.readFileSync(element.src, "utf8"), context);
        setImmediate(element.onload);
      },
    },
  };
  return context;
}

const page = vm.createContext({ location: { protocol: "file:" }, EventTarget, MessageEvent, console });
page.window = page;
page.document = {
  createElement: () => ({ get contentWindow() { return (this.frame ??= inner(page)); } }),
  body: { appendChild() {} },
};
const run = (file) => vm.runInContext(fs.readFileSync(path.join(site, file), "utf8"), page);
run("assets/iframe-worker.js");
run("search/search_index.js");
const folder = path.join(site, "assets/javascripts/workers");
const file = fs.readdirSync(folder).find((name) => /^search.*\.js$/.test(name));
page.worker = vm.runInContext(`new Worker(${JSON.stringify(path.join(folder, file))})`, page);
const index = vm.runInContext("__index", page);
index.options = { suggest: false };
page.worker.addEventListener("message", ({ data: { type, data } }) => {
  if (type === 1) page.worker.postMessage({ type: 2, data: words });
  if (type === 3) console.log(JSON.stringify(data.items.flat().map((item) => item.location)));
});
page.worker.postMessage({ type: 0, data: index });
