/**
 * Ranks killed and stopped at random moments of a run, from its start on: it ends within ten seconds with the right rank
 * named, and nothing of it is left. The seed is fixed; how far a run is when it is hit is up to the machine.
 */
import { expect, test } from "bun:test";
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { executable } from "../commands/mimo.ts";
import { alive, Launched } from "../parallel/launched.ts";

const runs = process.env.MIMO_TEST_FULL === "1" ? 200 : process.env.CI === "true" ? 12 : 5;
const book = join(import.meta.dir, "../../examples/text/king-james.txt");
/** Layouts, and their ranks. */
const layouts: readonly (readonly [flags: string, ranks: number])[] = [
	[`--preset nemotron-tiny --data-path ${book} --llm-dp 2`, 2],
	[`--preset nemotron-tiny --data-path ${book} --llm-tp 2 --llm-dp 2 --llm-ep 2`, 4],
	["--preset nemotron-vlm-tiny --encoder-tp 2 --llm-dp 2 --llm-ep 2", 4],
];
const small = "--lr-warmup-iters 1 --train-iters 100000 --log-interval 1 --device cpu --threads 1";

/** Numbers that repeat, in [0, 1). */
function numbers(seed: number): () => number {
	let state = seed;
	return () => {
		state = (state * 48271) % 2147483647;
		return state / 2147483647;
	};
}

const sharedMemory = () => readdirSync("/dev/shm").filter((name) => name.startsWith("mimo"));

interface End {
	readonly about: string;
	readonly flags: string;
	readonly ranks: number;
	readonly victim: number;
	readonly signal: "SIGKILL" | "SIGSTOP";
	readonly delay: number;
}

function drawEnds(): End[] {
	const random = numbers(20260131);
	return Array.from({ length: runs }, (_, run) => {
		const [flags, ranks] = layouts[Math.floor(random() * layouts.length)]!;
		const victim = Math.floor(random() * ranks);
		const signal = random() < 0.8 ? "SIGKILL" : "SIGSTOP";
		const delay = random() * 3000;
		const about = `run ${run}: ${signal} to rank ${victim} of ${flags}, ${delay.toFixed(0)} ms after the start`;
		return { about, flags, ranks, victim, signal, delay };
	});
}

async function meet({ about, flags, ranks, victim, signal, delay }: End): Promise<void> {
	const launched = Launched.run([executable, "train", ...`${flags} ${small}`.split(" ")]);
	await launched.said(new RegExp(`^rank ${ranks - 1}: pid \\d+`, "m"));
	await Bun.sleep(delay);
	const pids = launched.pids;
	const hit = performance.now();
	launched.signal(pids[victim]!, signal);
	const ended = await launched.end();
	const seconds = (performance.now() - hit) / 1000;
	const named = /^mimo: rank (\d+) \(/m.exec(ended.stderr)?.[1] ?? ended.stderr;
	expect([about, named, ended.exitCode]).toEqual([about, String(victim), 1]);
	expect([about, seconds < 10]).toEqual([about, true]);
	expect([about, pids.filter(alive)]).toEqual([about, []]);
}

test(`${runs} random ends`, async () => {
	const before = sharedMemory();
	const ends = drawEnds().values();
	// Two runs at a time: a stopped rank is only known to be silent after some seconds, in which nothing happens.
	const lane = async () => {
		for (const end of ends) await meet(end);
	};
	await Promise.all([lane(), lane()]);
	expect(sharedMemory()).toEqual(before);
}, 3_000_000);
