/**
 * A small program for tests of launching: every rank adds its rank up over all, step by step, on two groups. Where a
 * scenario says so a rank goes wrong.
 *
 *   bun program.ts RANKS SCENARIO [RANK] [PHASE]
 *
 * Phases of a step: forward (computing), collective (inside an all-reduce), optimizer (computing after it). Scenarios:
 * finish; pause (RANK waits in PHASE of step 2 for a signal of the test, and says so; the other ranks say when they are
 * about to wait for RANK); throw; exit; mismatch; hang; asked (steps until a signal asks for the end); deaf (pause, and
 * signals that ask for the end are only noted).
 */
import { onEveryRank } from "../../src/commands/ranks.ts";
import type { World } from "../../src/parallel/world.ts";
import { UserError } from "../../src/system/errors.ts";
import { exitCodes } from "../../src/system/exit-codes.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { ExitSignals } from "../../src/train/restart/checkpoints.ts";

const [ranksText, scenario = "finish", rankText = "-1", phase = ""] = process.argv.slice(2);
const ranks = Number(ranksText);
const steps = scenario === "asked" ? 100_000 : 4;
const large = 4_000_000;

/** Waits for the test's action on this process, without returning to the event loop, as training does. */
function pause(world: World): void {
	console.log(`paused in ${phase} (rank ${world.rank}, pid ${process.pid})`);
	Bun.sleepSync(120_000);
}

function goWrong(world: World, name: string): void {
	if (world.rank !== Number(rankText) || name !== phase) return;
	switch (scenario) {
		case "pause":
		case "deaf":
			pause(world);
			break;
		case "throw":
			throw new UserError("Sample 17 of images.tar holds no image.");
		case "exit":
			process.exit(0);
			break;
		case "abort":
			process.abort();
			break;
	}
}

/** Says that this rank is about to wait for the paused one, in a group that has it. */
function sayWaiting(world: World, name: string, members: readonly number[]): void {
	const paused = Number(rankText);
	if (scenario !== "pause" || name !== phase || world.rank === paused || !members.includes(paused)) return;
	console.log(`waits for rank ${paused}`);
}

async function work(world: World): Promise<number> {
	using signals = scenario === "asked" || scenario === "deaf" ? new ExitSignals(["SIGTERM", "SIGUSR1"]) : null;
	const everyone = Array.from({ length: world.size }, (_, rank) => rank);
	const all = await world.group("world", everyone);
	const half = everyone.filter((rank) => rank % 2 === world.rank % 2);
	const part = await world.group("language.dp", half);
	for (let step = 1; step <= steps; step++) {
		if (step === 2) goWrong(world, "forward");
		using x = Tensor.from(world.device, Float32Array.of(world.rank));
		if (step === 2) sayWaiting(world, "forward", half);
		part.allReduce(x).wait();
		using gradient = Tensor.zeros(world.device, [large]);
		const reducing = all.allReduce(gradient);
		if (step === 2) goWrong(world, "collective");
		if (step === 2 && scenario === "mismatch" && world.rank === Number(rankText)) all.allReduce(x).wait();
		if (step === 2 && !half.includes(Number(rankText))) sayWaiting(world, "forward", everyone);
		reducing.wait();
		if (step === 2) goWrong(world, "optimizer");
		if (step === 2) sayWaiting(world, "optimizer", everyone);
		all.barrier();
		world.progress(step);
		if (signals === null) continue;
		if (step === 2 && world.rank === 0) console.log("two steps are done");
		const asked = await signals.asked();
		if (all.exchange(Int32Array.of(asked ? 1 : 0)).some(([one]) => one === 1)) return exitCodes.runAgain;
	}
	if (world.rank === world.size - 1) console.log(`done: ${world.size} ranks, ${steps} steps`);
	else if (scenario === "chatty") console.log("a line\nof a rank that does not report");
	return 0;
}

if (scenario === "rendezvous" && process.env.RANK === rankText) {
	console.error(`paused in rendezvous (rank ${rankText}, pid ${process.pid})`);
	Bun.sleepSync(120_000);
}
await onEveryRank(
	{
		ranks,
		device: process.env.MIMO_TEST_DEVICE === "cuda" ? "cuda" : "cpu",
		backend: process.env.MIMO_TEST_BACKEND === "shm" ? "shm" : "nccl",
		threads: 1,
		configuration: { "llm-tp": process.env.TEST_LLM_TP ?? "2" },
		describe: (rank) => ({ module: "language", coordinates: `tp ${rank % 2} dp ${Math.floor(rank / 2)}` }),
		reporter: ranks - 1,
		timeoutMinutes: Number(process.env.TEST_TIMEOUT_MINUTES ?? 1),
	},
	work,
).catch((error: Error) => {
	process.stderr.write(`mimo: ${error.message}\n`);
	process.exit(error instanceof UserError ? error.exitCode : 70);
});
