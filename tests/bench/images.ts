/** Decoding and resizing pictures against Pillow: processor time of a picture, in turns. */
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Images } from "../../src/native/images.ts";
import type { Library } from "../../src/native/library.ts";
import { type Row, row } from "./measure.ts";

const turns = 3;
const rounds = 5;
/** Sizes near those that encoders take. */
const size = { width: 448, height: 448 };
const script = join(import.meta.dir, "pillow_reference.py");

/** Kinds, and the ratios that decoding is meant to reach. */
const kinds = [
	["jpg", "JPEG", 1],
	["png", "PNG", 1.2],
	["webp", "WebP", 1],
] as const;

/** An interpreter that has Pillow: MIMO_PYTHON, or python3 on the PATH; null when there is none. */
export function findPillow(): string | null {
	const python = process.env.MIMO_PYTHON ?? Bun.which("python3");
	if (!python) return null;
	return Bun.spawnSync([python, "-c", "import PIL"]).success ? python : null;
}

function runPython(python: string, ...args: string[]): string {
	const { success, stdout, stderr } = Bun.spawnSync([python, script, ...args], { stderr: "pipe" });
	if (!success) throw new Error(`${script} failed:\n${stderr}`);
	return stdout.toString();
}

/** Least processor seconds of an item over all rounds. */
function least<T>(items: readonly T[], run: (item: T) => void): number {
	let seconds = Number.POSITIVE_INFINITY;
	for (let round = 0; round < rounds; round++) {
		const before = process.cpuUsage();
		for (const item of items) run(item);
		const { user, system } = process.cpuUsage(before);
		seconds = Math.min(seconds, (user + system) / 1e6 / items.length);
	}
	return seconds;
}

export function benchImages(library: Library, python: string): Row[] {
	const images = new Images(library);
	const folder = mkdtempSync(join(tmpdir(), "mimo-bench-images-"));
	try {
		runPython(python, "make", folder);
		return kinds.flatMap(([extension, format, target]) => {
			const files = Array.from(
				{ length: 8 },
				(_, i) => new Uint8Array(readFileSync(join(folder, `${i}.${extension}`))),
			);
			const pictures = files.map((file) => images.decode(file));
			const pixels = pictures.reduce((sum, { width, height }) => sum + width * height, 0) / files.length / 1e6;
			const [ours, theirs] = [
				[Infinity, Infinity, Infinity],
				[Infinity, Infinity, Infinity],
			];
			for (let turn = 0; turn < turns; turn++) {
				const mine = [
					least(files, (file) => images.decode(file)),
					least(files, (file) => images.decodeResized(file, [size], "energon")),
					least(pictures, (picture) => images.resize(picture, size)),
				];
				const pillow = JSON.parse(
					runPython(python, "time", folder, extension, String(size.width), String(rounds)),
				) as number[];
				for (let i = 0; i < 3; i++) {
					ours[i] = Math.min(ours[i]!, mine[i]!);
					theirs[i] = Math.min(theirs[i]!, pillow[i]!);
				}
			}
			const rate = (seconds: number) => `${(1 / seconds).toFixed(0)} a second, ${(pixels / seconds).toFixed(0)} Mpx/s`;
			console.log(`${format}, decoded and resized: ${rate(ours[1]!)}; Pillow ${rate(theirs[1]!)}`);
			const operations = [
				[`decode ${format}`, target],
				[`decode ${format} and resize`, target],
				...(format === "JPEG" ? [["resize", 1.25] as const] : []),
			] as const;
			return operations.map(([operation, wanted]) => {
				const i = operation === "resize" ? 2 : operation.endsWith("resize") ? 1 : 0;
				const what = { group: "images", operation, shape: `${pixels.toFixed(1)} Mpx`, threads: 1 };
				return row({ ...what, baseline: "Pillow", target: wanted }, [ours[i]!, theirs[i]!]);
			});
		});
	} finally {
		rmSync(folder, { recursive: true });
	}
}
