/**
 * Algorithms of cuBLASLt and cuDNN that were timed for later runs (docs/decisions/cuda.md, "Timed algorithms"). A run takes
 * the choices that its file has when it starts, the same at all ranks, and no others: the algorithms that it times are for the
 * runs after it, so that no result depends on a clock.
 */
import { createHash } from "node:crypto";
import { join } from "node:path";
import type { TrainingConfiguration } from "../config/schema.ts";
import { placeFromEnvironment } from "../launch/place.ts";
import type { Device } from "../native/device.ts";
import { UserError } from "../native/errors.ts";
import { defaultCacheFolder, openOwnFolder, readOwnFile, replaceOwnFile } from "../native/private-folder.ts";
import { exchangeTexts } from "../parallel/exchange-texts.ts";
import type { Group } from "../parallel/group.ts";
import type { World } from "../parallel/world.ts";

/** First line of a file, before what it was timed with. */
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
	 * Reads the choices for this GPU and these libraries, and makes the device take them. Null where the configuration asks for
	 * none, or on the CPU library, which has none. Every rank calls this; a rank that finds other choices than rank 0 throws a
	 * UserError, as for a file that is not the user's own or is damaged.
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

	/** Number of choices that the run takes. */
	get size(): number {
		return this.lines.length;
	}

	/**
	 * Times what the run had no choice for, and adds it to the file of each host: that of the lowest rank where several
	 * timed the same. Every rank calls this when nothing else runs. Returns a sentence about it; null where nothing is to be timed.
	 */
	keep(): string | null {
		if (!this.times) return null;
		const leftOut = this.device.timeAlgorithms();
		const timed = exchangeTexts(this.group, this.device.timedAlgorithms());
		const merged = mergeChoices([...this.lines, ...timed.flatMap((text) => text.split("\n").filter(Boolean))]);
		if ((placeFromEnvironment()?.localRank ?? 0) === 0) {
			replaceOwnFile(this.path, `${FORMAT}\t${this.environment}\n${merged.join("\n")}\n`);
		}
		const skipped = leftOut === 0 ? "" : ` There was no memory to time ${leftOut} of this rank's.`;
		return `Timed ${merged.length - this.lines.length} algorithms for later runs: ${this.path}.${skipped}`;
	}
}

/** Environment that a choice holds for: the GPU and the versions of CUDA, cuBLASLt and cuDNN, without their paths. */
function environmentOf(device: Device): string {
	const { name, threads } = device.describe();
	const versions = device.library.versions.split("; ").filter((part) => !part.startsWith("NCCL"));
	return [name, `${threads} multiprocessors`, ...versions.map((part) => part.replace(/ \([^()]*\)$/, ""))].join("; ");
}

function digestOf(text: string): Buffer {
	return createHash("sha256").update(text).digest().subarray(0, 8);
}

/** The lines of choices in a file; empty without the file. */
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

/** The first line for each thing that is chosen for. */
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
