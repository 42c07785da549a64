/**
 * A rank of a run of several hosts that only lives: messages between hosts need no GPU.
 *
 *   bun hosts-program.ts SCENARIO [RANK]
 *
 * Scenarios: finish (each rank a little later than the one before); throw (RANK does); wait (for the end of the run).
 */
import { endRank } from "../../src/commands/ranks.ts";
import { identityOf, joinRun } from "../../src/launch/join.ts";
import { placeFromEnvironment } from "../../src/launch/place.ts";
import { Status } from "../../src/native/abi.ts";
import { NativeError, UserError } from "../../src/system/errors.ts";
import { testLibrary } from "../support.ts";

const [scenario, rankText] = process.argv.slice(2);
const place = placeFromEnvironment()!;
const library = await testLibrary();
// The CPU library refuses several hosts because its tensors cannot move between them; this program has no tensors.
const identity = {
	...identityOf(place.rank, place.worldSize, { library, version: "test", configuration: {} }),
	library: "cuda",
};

using run = await joinRun(place, identity, library, 1);
run.describe(place.rank, "language", `dp ${place.rank}`);
try {
	run.join(place.rank);
	// That other ranks have joined is known a moment later.
	while (run.progressSummary().joined < place.worldSize && run.watch() === null) await Bun.sleep(5);
	console.log(`rank ${place.rank} has joined`);
	if (scenario === "finish") await Bun.sleep(400 * place.rank);
	if (scenario === "throw" && place.rank === Number(rankText)) {
		await Bun.sleep(500);
		throw new UserError("Sample 17 of images.tar holds no image.");
	}
	while (scenario !== "finish") {
		if (run.watch() !== null) throw new NativeError("mimo_run_watch", Status.peer, "The run has failed.");
		await Bun.sleep(20);
	}
	run.leave();
} catch (error) {
	process.exit(await endRank(run, place, error));
}
