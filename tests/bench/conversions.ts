/** dist/mimo convert-ckpt on a synthetic checkpoint against `cp` of the same files, and the memory it takes. */

import { mkdirSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { configurationFromHuggingFace, languageCorrespondence } from "../../src/checkpoint/hf/families/index.ts";
import { spellings } from "../../src/checkpoint/hf/families/nemotron-h-names.ts";
import { writeHuggingFaceFiles } from "../../src/checkpoint/hf/folder.ts";
import { formatPythonJson, parsePythonJson } from "../../src/checkpoint/hf/json.ts";
import { bytesOfType, type TensorStore, type TensorType } from "../../src/checkpoint/store.ts";
import { executable } from "../commands/mimo.ts";
import { golden } from "../golden.ts";
import { type Row, row } from "./measure.ts";

/** A conversion has at least half the speed of a copy. */
const target = 0.5;
/** Bytes beyond the largest tensor that a conversion may hold. */
const memoryAllowance = 200e6;

/** Sizes that make about 2 GB in bf16. */
const sizes = { hidden_size: 1024, vocab_size: 32768, n_routed_experts: 128, moe_intermediate_size: 1792 };

/** Writes the model; its values are noise that repeats after a while. Returns bytes of the largest tensor and of all. */
function writeModel(folder: string): { readonly largest: number; readonly total: number } {
	const path = join(golden("hybrid-tiny"), "config.json");
	const json = { ...parsePythonJson(readFileSync(path, "utf8"), path), ...sizes };
	const { foreign } = languageCorrespondence(configurationFromHuggingFace(json, path), spellings.published, path);
	const tensors = new Map<string, TensorType>([...foreign].map(([name, shape]) => [name, { dtype: "BF16", shape }]));
	const noise = crypto.getRandomValues(new Uint8Array(2 ** 16));
	const store: TensorStore = {
		path: "synthetic",
		tensors,
		readInto: (_, offset, into) => {
			for (let at = 0; at < into.length; at += noise.length - 7) {
				into.set(noise.subarray(0, Math.min(noise.length, into.length - at)), at);
			}
			into[0] = offset % 251;
		},
		[Symbol.dispose]: () => {},
	};
	mkdirSync(folder);
	writeHuggingFaceFiles(folder, store, { configText: formatPythonJson(json), shardBytes: 500e6 });
	const bytes = [...tensors.values()].map(bytesOfType);
	return { largest: Math.max(...bytes), total: bytes.reduce((sum, one) => sum + one, 0) };
}

interface Timed {
	readonly seconds: number;
	/** Of all threads. */
	readonly processorSeconds: number;
	readonly peakBytes: number;
}

/** Milliseconds between two looks at a process's memory. */
const lookInterval = 10;

/**
 * The most memory a process had. Its resource usage would say how large the process was that started it, where that is
 * larger.
 */
async function peakOf(pid: number, ended: Promise<unknown>): Promise<number> {
	let peak = 0;
	let running = true;
	void ended.then(() => {
		running = false;
	});
	while (running) {
		try {
			const kibibytes = /^VmHWM:\s+(\d+) kB/m.exec(readFileSync(`/proc/${pid}/status`, "utf8"))?.[1];
			peak = Math.max(peak, Number(kibibytes ?? 0) * 1024);
		} catch {
			// It has ended.
		}
		await Bun.sleep(lookInterval);
	}
	return peak;
}

async function timed(command: readonly string[]): Promise<Timed> {
	const started = performance.now();
	const child = Bun.spawn([...command], { stdout: "pipe", stderr: "pipe" });
	const ended = child.exited.then(() => (performance.now() - started) / 1000);
	const peakBytes = await peakOf(child.pid, ended);
	if ((await child.exited) !== 0) throw new Error(`${command.join(" ")}: ${await child.stderr.text()}`);
	const { user, system } = child.resourceUsage()!.cpuTime;
	return { seconds: await ended, processorSeconds: Number(user + system) / 1e6, peakBytes };
}

/** A command and the folder that it makes. */
interface Contender {
	readonly command: readonly string[];
	readonly makes: string;
}

/**
 * The least of `rounds` times, of all commands in turns: disturbances of a machine only add. Each makes its folder anew
 * from a source that has just been copied, so that the page cache holds it. Peak memory is the most.
 */
async function leastOf<Name extends string>(
	contenders: Readonly<Record<Name, Contender>>,
	source: string,
	rounds: number,
): Promise<Record<Name, Timed>> {
	const least = {} as Record<Name, Timed>;
	for (let round = 0; round < rounds; round++) {
		for (const [name, { command, makes }] of Object.entries<Contender>(contenders) as [Name, Contender][]) {
			rmSync(makes, { recursive: true, force: true });
			// Data that earlier commands left to be written would hold this one up.
			Bun.spawnSync(["sync"]);
			// A virtual machine's host may have taken free pages back, and to get them again takes seconds: every command finds
			// pages that a copy has just given up.
			Bun.spawnSync(["sh", "-c", `cp -r '${source}' '${source}-warm'; rm -r '${source}-warm'`]);
			const now = await timed(command);
			const before = least[name] ?? now;
			least[name] = {
				seconds: Math.min(before.seconds, now.seconds),
				processorSeconds: Math.min(before.processorSeconds, now.processorSeconds),
				peakBytes: Math.max(before.peakBytes, now.peakBytes),
			};
		}
	}
	return least;
}

export async function benchConversions(rounds = 5): Promise<Row[]> {
	const folder = mkdtempSync(join(tmpdir(), "mimo-bench-"));
	try {
		const at = (name: string) => join(folder, name);
		const { largest, total } = writeModel(at("hf"));
		console.log(`conversions: ${(total / 1e9).toFixed(2)} GB, largest tensor ${(largest / 1e6).toFixed(0)} MB`);
		const rows: Row[] = [];
		for (const [from, to] of [
			["hf", "native"],
			["native", "torch_dist"],
			["torch_dist", "native"],
			["native", "hf"],
		] as const) {
			const source = at(from);
			const into = at(to === "native" && from === "torch_dist" ? "native-again" : to === "hf" ? "hf-again" : to);
			const command = [executable, "convert-ckpt", "--from", from, "--to", to, source, into];
			const copied = at("copy");
			const { copy, ours, durable, synced } = await leastOf(
				{
					copy: { command: ["cp", "-r", source, copied], makes: copied },
					ours: { command, makes: into },
					durable: { command: ["sh", "-c", `cp -r '${source}' '${copied}' && sync`], makes: copied },
					synced: { command: [...command, "--sync"], makes: into },
				},
				source,
				rounds,
			);
			rmSync(copied, { recursive: true });
			const extra = ours.peakBytes - largest;
			const memory = `${(extra / 1e6).toFixed(0)} MB beyond the largest tensor (${extra <= memoryAllowance ? "≤" : "above"} 200)`;
			const processor = `${ours.processorSeconds.toFixed(2)} s of processors, cp ${copy.processorSeconds.toFixed(2)} s`;
			console.log(`  ${from} → ${to}: peak ${(ours.peakBytes / 1e6).toFixed(0)} MB, ${memory}; ${processor}`);
			const what = {
				group: "conversions",
				operation: `${from} → ${to}`,
				shape: `${(total / 1e9).toFixed(2)} GB`,
				threads: 2,
			};
			rows.push(
				row({ ...what, baseline: "cp", target }, [ours.seconds, copy.seconds]),
				row({ ...what, operation: `${from} → ${to}, --sync`, baseline: "cp and sync", target }, [
					synced.seconds,
					durable.seconds,
				]),
			);
		}
		return rows;
	} finally {
		rmSync(folder, { recursive: true });
	}
}
