/** Packs a reference folder into tests/golden/NAME.tar.zst, the same bytes each time: `bun tests/golden/tools/pack.ts FOLDER`. */
import { basename, dirname, join, resolve } from "node:path";

const folder = resolve(process.argv[2]!);
const fixed = ["--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner", "--mode=u=rwX,go=rX"];
const tar = Bun.spawnSync(["tar", ...fixed, "-cf", "-", "-C", dirname(folder), basename(folder)], {
	maxBuffer: 2 ** 28,
	stderr: "inherit",
});
if (!tar.success) process.exit(1);
const target = join(import.meta.dir, "..", `${basename(folder)}.tar.zst`);
console.log(`${target}: ${await Bun.write(target, Bun.zstdCompressSync(tar.stdout, { level: 22 }))} bytes`);
