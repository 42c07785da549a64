/** `mimo bench`: runs the steps of a known model, checks their losses, and says how fast they are, by Megatron's count. */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { defineCommand } from "citty";
import { note } from "../observe/messages.ts";
import { print } from "../observe/output.ts";
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { readWholeText } from "../system/input-file.ts";
import { ownProgram, programVersion } from "../system/program-version.ts";
import { choice, text, whole } from "./arguments.ts";
import { addRow } from "./bench/board.ts";
import { type BenchModelName, benchModels, compareLosses } from "./bench/models.ts";

const names = Object.keys(benchModels) as BenchModelName[];
const precisions = ["bf16", "e4m3"] as const;

export default defineCommand({
	meta: {
		name: "bench",
		description: `Step a known model and say how fast: ${names.map((name) => `${name}, ${benchModels[name].summary}`).join("; ")}.`,
	},
	args: {
		model: {
			type: "string",
			description: "Default: nemotron-nano with a GPU, laptop without.",
			valueHint: names.join("|"),
		},
		precision: {
			type: "string",
			description: "e4m3: products of experts and projections in FP8, on Hopper; the losses are checked likewise.",
			valueHint: precisions.join("|"),
			default: "bf16",
		},
		gpus: { type: "string", description: "GPUs of this host, or processes of the laptop's model.", default: "1" },
		steps: { type: "string", description: "Steps; the first two are not timed.", default: "10" },
		trail: {
			type: "string",
			description: "A run's JSON log (log-json) with the losses to check; default: the stored ones.",
		},
		log: { type: "string", description: "Keep this run's JSON log here, for later runs' --trail." },
		record: { type: "string", description: "A Markdown file such as docs/records.md, to which a row is added." },
		note: { type: "string", description: "With --record: what changed." },
	},
	run: async ({ args }) => {
		const gpus = gpuCount();
		const model = choice(args, "model", names) ?? (gpus > 0 ? "nemotron-nano" : "laptop");
		const ranks = wholeFrom(args, "gpus", 1);
		const steps = wholeFrom(args, "steps", 3);
		const { flags, e4m3, trails, tolerance } = benchModels[model];
		const precision = choice(args, "precision", precisions)!;
		if (precision === "e4m3" && e4m3 === null) {
			throw new UserError(`--precision e4m3 is for models that step on GPUs; --model ${model} runs in fp32.`);
		}
		const onGpus = model !== "laptop";
		if (onGpus && ranks > gpus) {
			throw new UserError(
				`--gpus is ${ranks}, and this machine has ${counted(gpus, "GPU")}; --model laptop needs none.`,
			);
		}
		const given = text(args, "trail");
		const trail =
			given === null ? ((trails as Readonly<Record<number, readonly number[]>>)[ranks] ?? null) : readRun(given).losses;
		const folder = mkdtempSync(join(tmpdir(), "mimo-bench-"));
		try {
			const log = text(args, "log") ?? join(folder, "log.jsonl");
			using samples = onGpus ? new GpuSamples() : null;
			const all = precision === "e4m3" ? `${flags(ranks)} ${e4m3}` : flags(ranks);
			await train([...all.split(" "), "--train-iters", `${steps}`, "--log-json", log]);
			const run = readRun(log);
			const compared = trail === null ? 0 : compareLosses(run.losses, trail, tolerance);
			const load = (await samples?.end()) ?? null;
			const record = text(args, "record");
			report(precision === "e4m3" ? `${model}, e4m3` : model, run, {
				compared,
				tolerance,
				load,
				ranks,
				record,
				changed: text(args, "note") ?? "",
			});
		} finally {
			rmSync(folder, { recursive: true });
		}
	},
});

function wholeFrom(args: Parameters<typeof whole>[0], name: string, least: number): number {
	const value = whole(args, name)!;
	if (value >= least) return value;
	throw new UserError(`--${name} is ${value}; allowed is an integer from ${least}.`, exitCodes.usage);
}

/** Trains as a program of its own, with its lines on this one's output. */
async function train(flags: readonly string[]): Promise<void> {
	const child = Bun.spawn([...ownProgram(), "train", ...flags], {
		stdin: "ignore",
		stdout: "inherit",
		stderr: "inherit",
	});
	const code = await child.exited;
	if (code !== 0) throw new UserError(`The steps ended with exit code ${code}.`);
}

/** Bytes of the largest log that is read. */
const largestLog = 2 ** 28;

/** The contents of a run's JSON log. */
interface MeasuredRun {
	readonly device: string;
	readonly ranks: number;
	/** Of a step, by Megatron's count. */
	readonly flops: number;
	/** Seconds of the steps after the second. */
	readonly seconds: readonly number[];
	readonly losses: readonly number[];
}

function readRun(path: string): MeasuredRun {
	const written = readWholeText(path, largestLog).trim().split("\n");
	let lines: Record<string, unknown>[];
	try {
		lines = written.map((line) => JSON.parse(line) as Record<string, unknown>);
	} catch {
		throw new UserError(`${path} is no JSON log of a training.`);
	}
	const start = lines.find(({ event }) => event === "start");
	const taken = lines.filter((line) => typeof line["lm loss"] === "number" && typeof line.elapsed_ms === "number");
	if (start === undefined || taken.length === 0)
		throw new UserError(`${path} is no JSON log of a training with steps.`);
	return {
		device: String(start.device),
		ranks: Number(start.world_size),
		flops: Number(start.flops_per_step),
		seconds: taken.slice(2).map((line) => (line.elapsed_ms as number) / 1000),
		losses: taken.map((line) => line["lm loss"] as number),
	};
}

interface Outcome {
	/** Steps whose losses were compared with the trail; 0: no trail is stored. */
	readonly compared: number;
	readonly tolerance: number;
	readonly load: string | null;
	readonly ranks: number;
	readonly record: string | null;
	readonly changed: string;
}

function report(model: string, run: MeasuredRun, { compared, tolerance, load, ranks, record, changed }: Outcome): void {
	const median = medianOf(run.seconds);
	const rate = rateText(run.flops / median / run.ranks);
	const times = `${milliseconds(median)} (${milliseconds(Math.min(...run.seconds))})`;
	const unit = model === "laptop" ? "process" : "GPU";
	const loss = compared === 0 ? "no trail" : `${counted(compared, "step")} within ${tolerance}`;
	const hardware = `${ranks === 1 ? "" : `${ranks} × `}${run.device}${load === null ? "" : `, ${load}`}`;
	print(
		`${model} on ${hardware}: a step takes ${times} ms, median (least) of ${run.seconds.length}: ${rate} a ${unit} by Megatron's count.`,
	);
	print(
		compared === 0
			? `Losses: ${run.losses.join(" ")}. No trail is stored for ${counted(ranks, unit)}; --log keeps this one, --trail compares with it.`
			: `Losses of ${counted(compared, "step")} are the trail's within ${tolerance}.`,
	);
	if (record === null) return;
	addRow(record, {
		date: new Date().toISOString().slice(0, 10),
		commit: /commit (\w+)/.exec(programVersion())![1]!,
		hardware,
		model,
		"median (least) ms": times,
		"rate a GPU": rate,
		loss,
		"what changed": changed,
	});
	note(`${record} has one row more.`);
}

const milliseconds = (seconds: number) => (1000 * seconds).toFixed(1);
const rateText = (flops: number) =>
	flops < 1e12 ? `${(flops / 1e9).toFixed(1)} GFLOP/s` : `${(flops / 1e12).toFixed(1)} TFLOP/s`;

function medianOf(values: readonly number[]): number {
	const sorted = values.toSorted((a, b) => a - b);
	const middle = Math.floor(sorted.length / 2);
	return sorted.length % 2 === 1 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2;
}

/** Number of GPUs that the NVIDIA driver lists. */
function gpuCount(): number {
	if (!Bun.which("nvidia-smi")) return 0;
	const { stdout, success } = Bun.spawnSync(["nvidia-smi", "--list-gpus"], { stderr: "ignore", timeout: 20_000 });
	return success
		? stdout
				.toString()
				.split("\n")
				.filter((line) => line.startsWith("GPU ")).length
		: 0;
}

/** Clocks and power of the GPUs while steps run. */
class GpuSamples implements Disposable {
	readonly #tool = Bun.spawn(
		["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "--loop-ms=500"],
		{ stdout: "pipe", stderr: "ignore" },
	);
	readonly #text = new Response(this.#tool.stdout).text();

	/** Ends sampling; medians of the samples that took at least half of the most power, such as "1410 MHz, 690 W"; null: none came. */
	async end(): Promise<string | null> {
		this.#tool.kill();
		return loadText(await this.#text);
	}

	[Symbol.dispose](): void {
		this.#tool.kill();
	}
}

/** The medians of `nvidia-smi`'s lines "clock, power". */
export function loadText(lines: string): string | null {
	const samples = lines
		.split("\n")
		.map((line) => line.split(",").map(Number))
		.filter((cells) => cells.length === 2 && cells.every(Number.isFinite)) as [number, number][];
	const most = Math.max(...samples.map(([, power]) => power));
	const busy = samples.filter(([, power]) => power >= most / 2);
	if (busy.length === 0) return null;
	const median = (place: 0 | 1) => medianOf(busy.map((sample) => sample[place])).toFixed(0);
	return `${median(0)} MHz, ${median(1)} W`;
}
