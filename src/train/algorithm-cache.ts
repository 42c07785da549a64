/**
 * A file of timed algorithm choices of cuBLASLt and cuDNN (docs/decisions/cuda.md, "Timed algorithms"). A run uses only the
 * choices that the file holds when the run starts, equal on all ranks; algorithms timed during the run serve later runs, so that
 * no result depends on a clock.
 */
import { createHash } from "node:crypto";
import { join } from "node:path";
import type { TrainingConfiguration } from "../config/schema.ts";
import { placeFromEnvironment } from "../launch/place.ts";
import type { Device } from "../native/device.ts";
import { exchangeTexts, type Group, type World } from "../parallel/index.ts";
import { UserError } from "../system/errors.ts";
import { defaultCacheFolder, openOwnFolder, readOwnFile, replaceOwnFile } from "../system/private-folder.ts";

/** First field of a file's first line; the environment follows. */
const FORMAT = "mimo algorithms 1";

export class AlgorithmCache {
	private constructor(
		readonly path: string,
		private readonly environment: string,
		private readonly lines: readonly string[],
		private readonly device: Device,
		private readonly group: Group,
		private readonly times: boolean,
	) {}

	/**
	 * Reads the choices for this GPU and these library versions and hands them to the device. Returns null if the configuration
	 * wants heuristics, or on the CPU library, which has no choice. Collective over the world. Throws a UserError on a rank whose
	 * choices differ from rank 0's, and for a file that another user can write or that is damaged.
	 */
	static async open(c: TrainingConfiguration, world: World): Promise<AlgorithmCache | null> {
		const { device } = world;
		if (c.algorithmChoice === "heuristic" || device.library.kind === "cpu") return null;
		const flag = "--algorithm-cache-folder";
		const folder = openOwnFolder(c.algorithmCacheFolder ?? defaultCacheFolder(), "mimo-algorithms-v1", flag);
		const environment = environmentOf(device);
		const path = join(folder, `${digestOf(environment).toString("hex")}.tsv`);
		const lines = readChoices(path, environment);
		const group = await world.group("world", [...Array(world.size).keys()]);
		requireAgreement(group, [environment, ...lines], path);
		device.setAlgorithms(lines.join("\n"));
		return new AlgorithmCache(path, environment, lines, device, group, c.algorithmChoice === "timed");
	}

	/** Number of choices that the run uses. */
	get size(): number {
		return this.lines.length;
	}

	/**
	 * Times the algorithms that the run had no choice for and adds them to each host's file; if several ranks timed the same
	 * problem the lowest rank's choice is kept. Collective over the world, called when nothing else runs. Returns a sentence for
	 * the user; null if the run does not time.
	 */
	keep(): string | null {
		if (!this.times) return null;
		const untimed = this.device.timeAlgorithms();
		const timed = exchangeTexts(this.group, this.device.timedAlgorithms());
		const merged = mergeChoices([...this.lines, ...timed.flatMap((text) => text.split("\n").filter(Boolean))]);
		if ((placeFromEnvironment()?.localRank ?? 0) === 0) {
			replaceOwnFile(this.path, `${FORMAT}\t${this.environment}\n${merged.join("\n")}\n`);
		}
		const skipped = untimed === 0 ? "" : ` There was no memory to time ${untimed} of this rank's.`;
		return `Timed ${merged.length - this.lines.length} algorithms for later runs: ${this.path}.${skipped}`;
	}
}

/** The environment in which a choice is valid: GPU name and versions of CUDA, cuBLASLt and cuDNN, without paths. */
function environmentOf(device: Device): string {
	const { name, threads } = device.describe();
	const versions = device.library.versions.split("; ").filter((part) => !part.startsWith("NCCL"));
	return [name, `${threads} multiprocessors`, ...versions.map((part) => part.replace(/ \([^()]*\)$/, ""))].join("; ");
}

function digestOf(text: string): Buffer {
	return createHash("sha256").update(text).digest().subarray(0, 8);
}

/** The choices in a file, a line each; empty if the file does not exist. */
function readChoices(path: string, environment: string): string[] {
	const damaged = (): never => {
		throw new UserError(`${path} holds no algorithms that this user's runs timed for ${environment}: remove it.`);
	};
	const bytes = readOwnFile(path, damaged);
	if (bytes === null) return [];
	const [head, ...lines] = new TextDecoder().decode(bytes).split("\n");
	const last = lines.pop();
	if (head !== `${FORMAT}\t${environment}` || last !== "") return damaged();
	return lines.every((line) => /^[^\t]+\t[^\t]+(\t[^\t]*)*$/.test(line)) ? lines : damaged();
}

/** Drops all but the first choice for each problem. */
function mergeChoices(lines: readonly string[]): string[] {
	const first = new Map<string, string>();
	for (const line of lines) {
		const [what] = line.split("\t") as [string];
		if (!first.has(what)) first.set(what, line);
	}
	return [...first.values()];
}

function requireAgreement(group: Group, lines: readonly string[], path: string): void {
	const digest = digestOf(lines.join("\n"));
	const words = Int32Array.of(digest.readInt32LE(0), digest.readInt32LE(4));
	const [first, ...others] = group.exchange(words) as [Int32Array, ...Int32Array[]];
	const differs = others.findIndex((of) => of[0] !== first[0] || of[1] !== first[1]) + 1;
	if (differs === 0) return;
	throw new UserError(
		`Rank ${group.ranks[differs]} has another GPU, other libraries or other timed algorithms than rank ${group.ranks[0]}, so that their results would differ: copy ${path} of rank ${group.ranks[0]}'s host to all hosts, or remove it everywhere.`,
	);
}
