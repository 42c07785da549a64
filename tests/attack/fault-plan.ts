/**
 * Faults that a run may meet: their kind, time and victim. They are drawn from a seed; kinds take turns, so that a
 * dozen holds them all.
 */

import { join } from "node:path";

/** Flags of a small run, and its ranks. */
export interface Layout {
	readonly name: string;
	readonly flags: string;
	readonly ranks: number;
}

export type FaultSignal = "SIGKILL" | "SIGSTOP" | "SIGTERM" | "SIGABRT" | "SIGSEGV" | "SIGBUS";
export type Moment = "start" | "first" | "random" | "save" | "async save" | "evaluation" | "last";

interface About {
	readonly number: number;
	readonly layout: Layout;
	readonly moment: Moment;
	readonly signal: FaultSignal;
	/** Rank that is hit. */
	readonly victim: number;
	/** In [0, 1): how long after the moment. */
	readonly delay: number;
}

/**
 * rank: a signal to a rank of our launcher. alone: to a rank that torchrun's variables have brought there. computing: to a
 * rank while the others are in a long computation. launcher: to the launcher. launcher stopped: to a rank behind its back.
 * few descriptors: to a rank, 64 open files allowed. terminal: it is closed. disk, large file: no room for the second
 * checkpoint, or files may not be that large. shared memory: /dev/shm is too small.
 */
export type FaultKind =
	| "rank"
	| "alone"
	| "computing"
	| "launcher"
	| "launcher stopped"
	| "few descriptors"
	| "terminal"
	| "disk"
	| "large file"
	| "shared memory";

export interface Fault extends About {
	readonly kind: FaultKind;
}

/** Kinds that need a mount namespace. */
export const mounting: readonly FaultKind[] = ["disk", "shared memory"];

/** A dozen: half of it plain signals to ranks. */
const turns: readonly FaultKind[] = [
	"rank",
	"alone",
	"disk",
	"rank",
	"terminal",
	"launcher stopped",
	"rank",
	"computing",
	"launcher",
	"shared memory",
	"few descriptors",
	"large file",
	"rank",
	"alone",
	"rank",
	"launcher",
	"rank",
	"alone",
	"rank",
	"rank",
];

export const book = join(import.meta.dir, "../../examples/text/king-james.txt");
const text = (more: string) => `--preset nemotron-tiny --data-path ${book} --hidden-size 64 --seq-length 32 ${more}`;
export const layouts: readonly Layout[] = [
	{ name: "dp2", flags: text("--llm-dp 2"), ranks: 2 },
	{ name: "dp4", flags: text("--llm-dp 4"), ranks: 4 },
	{ name: "tp2dp2ep2", flags: text("--llm-tp 2 --llm-dp 2 --llm-ep 2"), ranks: 4 },
	{
		name: "2+dp2ep2",
		flags:
			"--preset nemotron-vlm-tiny --hidden-size 64 --vision-num-layers 1 --vision-hidden-size 32 --seq-length 32 " +
			"--encoder-tp 2 --llm-dp 2 --llm-ep 2",
		ranks: 4,
	},
];

/** By weight. A stopped rank takes five seconds to be known. */
const signals: readonly FaultSignal[] = [
	...Array<FaultSignal>(5).fill("SIGKILL"),
	...Array<FaultSignal>(2).fill("SIGSTOP"),
	...Array<FaultSignal>(2).fill("SIGTERM"),
	"SIGABRT",
	"SIGSEGV",
	"SIGBUS",
];
const moments: readonly Moment[] = ["start", "first", "random", "random", "save", "async save", "evaluation", "last"];
/** Ranks have met by then: before, they know of each other only through a launcher that is there. */
const momentsAfterMeeting: readonly Moment[] = ["first", "random", "save", "async save", "evaluation", "last"];

/** Numbers that repeat, in [0, 1). */
export function numbers(seed: number): () => number {
	let state = (seed % 2147483646) + 1;
	return () => {
		state = (state * 48271) % 2147483647;
		return state / 2147483647;
	};
}

/** `possible`: whether this machine can do a kind; another takes the place of one that it cannot. */
export function drawFaults(count: number, seed: number, possible: (kind: FaultKind) => boolean): Fault[] {
	const random = numbers(seed);
	for (let i = 0; i < 10; i++) random();
	const one = <Value>(values: readonly Value[]) => values[Math.floor(random() * values.length)]!;
	return Array.from({ length: count }, (_, number) => {
		const turn = turns[number % turns.length]!;
		const kind = possible(turn) ? turn : "rank";
		const layout = one(layouts);
		const any = one(signals);
		// No process ends a launcher that is stopped, and ranks that compute are known to be alive.
		const deadly = any === "SIGSTOP" ? "SIGKILL" : any;
		const signal = ["launcher", "launcher stopped", "computing"].includes(kind) ? deadly : any;
		const unattended = kind === "alone" || kind === "launcher stopped";
		const moment = one(unattended ? momentsAfterMeeting : moments);
		return { number, kind, layout, signal, moment, victim: Math.floor(random() * layout.ranks), delay: random() };
	});
}

/** "rank 2 SIGKILL, save, tp2dp2ep2". */
export function describeFault({ number, kind, layout, moment, signal, victim }: Fault): string {
	const event =
		kind === "disk" || kind === "large file" || kind === "shared memory"
			? ""
			: kind === "terminal"
				? `, ${moment}`
				: `: ${signal}${kind === "launcher" ? "" : ` to rank ${victim}`}, ${kind === "computing" ? "a long pass" : moment}`;
	return `${String(number).padStart(3)} ${kind}${event}, ${layout.name}`;
}
