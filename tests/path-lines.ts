/**
 * How many source lines lie between a flag and a kernel: `bun tests/path-lines.ts [FOLDER]` prints, for a run of the language
 * model alone and for both modules on grids of their own, the lines of every file on the path of a training step, by folder.
 *
 * The path is all files that `commands/train.ts` and `train/run.ts` reach over imports of values, without type imports, in
 * the rooms that a step goes through: `train` itself, `schedule`, `models`, `optim`, `parallel`, `tensor`, the passes' input
 * (`data/device-input.ts`, `data/microbatch.ts`, `data/images.ts`), and `native/device.ts`, where an operation leaves for
 * the native library.
 * Not entered is what stands beside a step: configuration, launching, records, checkpoints, sources of data, decoding,
 * folders below `train`, and the wrappers of single operations (`tensor/ops`). The language model alone does not enter files of
 * the encoder and of edges either. Lines are those of the file, with comments and blank ones. FOLDER: another copy of
 * the repository.
 */
import { existsSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { columns } from "../src/observe/output.ts";

const roots = ["commands/train.ts", "train/run.ts", "native/device.ts"];
const rooms = /^(train\/[^/]+|schedule\/.*|models\/.*|optim\/.*|parallel\/.*|tensor\/[^/]+)\.ts$/;
const single = [
	...roots,
	"data/device-input.ts",
	"train/device-input.ts",
	"data/microbatch.ts",
	"data/images.ts",
	"native/device.ts",
];
/** Files that only a run with an encoder goes through. */
const ofEncoder =
	/^(models\/(vision|vit)\/.*|models\/tower\.ts|parallel\/(edge|edge-layout)\.ts|guests\/prefetch\/prefetch\.ts|train\/(encoder-pass|encoder-kinds|participation)\.ts|data\/images\.ts)$/;
/** Reports, sources and restarts, in a tree whose train/ has no folders, and launching where parallel/ holds it. */
const beside =
	/^(train\/(batch-queue|batch-source|captions|checkpoints|energon-source|generate|hugging-face|indexed-source|lane|non-finite|profile|provenance|sources|starting-point|step-metrics|timing)|parallel\/(bandwidth|describe-topology|diagnosis|exchange-texts|exit-signals|gathering|hosts|identity|join|launcher|line-connection|output|place|rendezvous|slurm)|models\/.*\/counts)\.ts$/;

function valueImports(text: string): string[] {
	const code = text.replace(/\/\*[\s\S]*?\*\//g, "").replace(/^\s*\/\/.*$/gm, "");
	const statements = code.matchAll(/\b(?:import|export)\s+(type\s)?(?:([\w*{}\s,$]+?)\sfrom\s*)?"(\.[^"]+)"/g);
	const ofTypes = (names: string) =>
		names
			.replaceAll(/[{}]/g, "")
			.split(",")
			.map((name) => name.trim())
			.filter(Boolean)
			.every((name) => name.startsWith("type "));
	const found = [...statements].flatMap(([, type, names, to]) =>
		type !== undefined || (names?.includes("{") && ofTypes(names)) ? [] : [to!],
	);
	return [...found, ...Array.from(code.matchAll(/\bimport\(\s*"(\.[^"]+)"/g), ([, to]) => to!)];
}

/** Files of the path and their lines. */
export function pathOf(src: string, withEncoder: boolean): Map<string, number> {
	const lines = new Map<string, number>();
	const visit = (file: string): void => {
		const wanted = (rooms.test(file) || single.includes(file)) && !beside.test(file);
		if (!wanted || lines.has(file) || (!withEncoder && ofEncoder.test(file))) return;
		if (!existsSync(join(src, file))) return;
		const text = readFileSync(join(src, file), "utf8");
		lines.set(file, text.split("\n").length - 1);
		for (const to of valueImports(text)) visit(join(dirname(file), to));
	};
	for (const root of roots) visit(root);
	return lines;
}

export function total(lines: ReadonlyMap<string, number>): number {
	return lines.values().reduce((sum, one) => sum + one, 0);
}

if (import.meta.main) {
	const src = join(process.argv[2] ?? join(import.meta.dir, ".."), "src");
	const paths = [pathOf(src, false), pathOf(src, true)] as const;
	const folders = [...new Set([...paths[1].keys()].map(dirname))].sort();
	const cell = (lines: ReadonlyMap<string, number>, folder: string) => {
		const own = new Map([...lines].filter(([file]) => dirname(file) === folder));
		return [`${own.size}`, `${total(own)}`];
	};
	const rows = folders.map((folder) => [folder, ...paths.flatMap((lines) => cell(lines, folder))]);
	const sums = ["all", ...paths.flatMap((lines) => [`${lines.size}`, `${total(lines)}`])];
	console.log(columns([["", "files", "language alone", "files", "disjoint"], ...rows, sums]).join("\n"));
	if (process.argv.includes("--files")) {
		for (const [file, count] of paths[1])
			console.log(`${count}`.padStart(5), paths[0].has(file) ? "both" : "disj", file);
	}
}
