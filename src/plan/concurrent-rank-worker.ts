/** A thread of Company: an entry point of its own. It trains one rank, all others imagined, a step whenever it is asked. */
import { Device } from "../native/device.ts";
import { openLibrary } from "../native/library.ts";
import { askedToEnd, type CompanionJob, CompanionWord, gone } from "./concurrent-ranks.ts";
import { enoughMicrobatches } from "./rank-plan.ts";
import { openRank } from "./rank-run.ts";

declare const self: Worker;

self.onmessage = async ({ data }: MessageEvent<CompanionJob>) => {
	const words = new Int32Array(data.words);
	const seconds = new Float64Array(data.seconds);
	const finish = (steps: number) => {
		Atomics.store(words, CompanionWord.finished, steps);
		Atomics.notify(words, CompanionWord.finished);
	};
	try {
		using device = Device.open(await openLibrary("cpu"), { threads: data.threads });
		using run = await openRank(data.configuration, device, data.rank, { phase() {}, transfer() {}, imbalance: 1 });
		const microbatches = enoughMicrobatches(data.configuration);
		run.initialise();
		run.step(microbatches);
		finish(0);
		for (let steps = 0; ; finish(steps)) {
			Atomics.wait(words, CompanionWord.asked, steps);
			steps = Atomics.load(words, CompanionWord.asked);
			if (steps === askedToEnd) break;
			const started = performance.now();
			run.step(microbatches);
			seconds[0] = (performance.now() - started) / 1000;
		}
	} finally {
		finish(gone);
	}
};
