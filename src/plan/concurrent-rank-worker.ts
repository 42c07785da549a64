/** Worker entry point of ConcurrentRanks: trains one rank, with all others simulated, a step each time it is requested. */
import { Device } from "../native/device.ts";
import { openLibrary } from "../native/library.ts";
import { askedToEnd, type ConcurrentRankJob, gone, SharedWord } from "./concurrent-ranks.ts";
import { enoughMicrobatches } from "./rank-plan.ts";
import { openRank } from "./rank-run.ts";

declare const self: Worker;

self.onmessage = async ({ data }: MessageEvent<ConcurrentRankJob>) => {
	const words = new Int32Array(data.words);
	const seconds = new Float64Array(data.seconds);
	const finish = (steps: number) => {
		Atomics.store(words, SharedWord.finished, steps);
		Atomics.notify(words, SharedWord.finished);
	};
	try {
		using device = Device.open(await openLibrary("cpu"), { threads: data.threads });
		using run = await openRank(data.configuration, device, data.rank, { phase() {}, transfer() {}, imbalance: 1 });
		const microbatches = enoughMicrobatches(data.configuration);
		run.initialise();
		run.step(microbatches);
		finish(0);
		for (let steps = 0; ; finish(steps)) {
			Atomics.wait(words, SharedWord.asked, steps);
			steps = Atomics.load(words, SharedWord.asked);
			if (steps === askedToEnd) break;
			const started = performance.now();
			run.step(microbatches);
			seconds[0] = (performance.now() - started) / 1000;
		}
	} finally {
		finish(gone);
	}
};
