// Builds the page into the Python package. `node build.mjs --check` compares with what lies there.
import { build } from "esbuild";
import { readdirSync, readFileSync, writeFileSync, mkdirSync } from "node:fs";
import { gzipSync } from "node:zlib";

const target = new URL("../client/trocar/_page/static/", import.meta.url);
const MAX_COMPRESSED_BYTES = 200 << 10;

const { outputFiles } = await build({
  entryPoints: { page: "src/main.js", style: "src/style.css" },
  outdir: "static",
  bundle: true,
  minify: true,
  write: false,
  format: "esm",
  target: ["es2022"],
  legalComments: "eof",
});
const made = new Map(outputFiles.map((file) => [file.path.split("/").pop(), Buffer.from(file.contents)]));
for (const name of readdirSync("public")) made.set(name, readFileSync(`public/${name}`));

const compressed = [...made].filter(([name]) => /\.(js|css|html)$/.test(name));
const byteCount = compressed.reduce((sum, [, content]) => sum + gzipSync(content).length, 0);
if (byteCount > MAX_COMPRESSED_BYTES) throw new Error(`the page has ${byteCount} bytes compressed`);

if (process.argv.includes("--check")) {
  const present = readdirSync(target).sort();
  const differing = [...made].filter(([name, content]) => !present.includes(name) || !readFileSync(new URL(name, target)).equals(content));
  if (differing.length || present.length !== made.size) {
    console.error(`the page is not fresh (${differing.map(([name]) => name)}); run: make page`);
    process.exit(1);
  }
} else {
  mkdirSync(target, { recursive: true });
  for (const [name, content] of made) writeFileSync(new URL(name, target), content);
}
console.log(`the page: ${byteCount} bytes compressed`);
