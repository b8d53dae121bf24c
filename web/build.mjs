// Builds the page into the folder that the first argument names, ../client/web/static without one.
//
// The output depends on the sources and the lock file alone: names carry a hash of their content, and nothing
// carries a time or a path. `node build.mjs --checksums` also writes checksums.txt.
import { createHash } from "node:crypto";
import { existsSync, mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
process.chdir(here);
const args = process.argv.slice(2);
const out = resolve(args.find((arg) => !arg.startsWith("--")) ?? "../client/web/static");

rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });

const options = {
  absWorkingDir: here,
  outdir: out,
  bundle: true,
  target: "es2022",
  minify: true,
  charset: "utf8",
  legalComments: "none",
  jsx: "automatic",
  jsxImportSource: "preact",
  metafile: true,
  logLevel: "warning",
};
const result = await build({
  ...options,
  entryPoints: { page: "src/main.tsx" },
  splitting: true,
  format: "esm",
  entryNames: "[name]-[hash]",
  chunkNames: "[name]-[hash]",
  assetNames: "[name]-[hash]",
});
// One script and one style, which client/timeline/html.py puts into each file.
const file = await build({ ...options, entryPoints: { "timeline-file": "src/timelineFile.tsx" }, format: "iife", entryNames: "[name]" });
const fileScript = join(out, "timeline-file.js");
const notice = licences(file.metafile, "This file contains these packages.");
// HTML ends a script at "</script", and a comment of HTML would change where.
writeFileSync(fileScript, `/*\n${notice}*/\n${readFileSync(fileScript, "utf8")}`);
for (const name of ["timeline-file.js", "timeline-file.css"]) {
  if (/<\/(script|style)|<!--|\r|\0/i.test(readFileSync(join(out, name), "utf8"))) throw new Error(`${name} cannot be a part of HTML`);
}

const outputs = Object.entries(result.metafile.outputs);
const [script] = outputs.find(([, output]) => output.entryPoint === "src/main.tsx");
const style = result.metafile.outputs[script].cssBundle;
const nameOf = (path) => path.split("/").pop();
const page = readFileSync("src/index.html", "utf8")
  .replace("PAGE_SCRIPT", `/static/${nameOf(script)}`)
  .replace("PAGE_STYLE", `/static/${nameOf(style)}`);
writeFileSync(join(out, "index.html"), page);
writeFileSync(join(out, "licences.txt"), licences(result.metafile, "The files in this folder contain these packages."));
if (args.includes("--checksums")) writeFileSync("checksums.txt", checksums(out));

/** Returns the licences of the packages that are part of the built files. */
function licences(metafile, heading) {
  const names = new Set();
  for (const path of Object.keys(metafile.inputs)) {
    const match = /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(path);
    if (match) names.add(match[1]);
  }
  const texts = [...names].sort().map((name) => {
    const folder = join("node_modules", name);
    const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
    const text = file && existsSync(join(folder, file)) ? readFileSync(join(folder, file), "utf8").trim() : "";
    return `${name} ${version} (${license})\n\n${text}\n`;
  });
  return [`${heading}\n`, ...texts].join(`\n${"-".repeat(80)}\n`);
}

/** Returns lines as `sha256sum` writes them, for the files of a folder. */
function checksums(folder) {
  const lines = readdirSync(folder)
    .sort()
    .map((name) => `${createHash("sha256").update(readFileSync(join(folder, name))).digest("hex")}  ${name}\n`);
  return lines.join("");
}
