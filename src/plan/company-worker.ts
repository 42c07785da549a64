/** A thread of Company: an entry point of its own. It trains one rank, all others imagined, until it is asked to end. */
import { Device } from "../native/device.ts";
import { openLibrary } from "../native/library.ts";
import { type CompanionJob, CompanionState } from "./company.ts";
import { openRank } from "./rank-run.ts";

declare const self: Worker;

self.onmessage = async ({ data }: MessageEvent<CompanionJob>) => {
	const word = new Int32Array(data.state);
	const { starting, working, ended } = CompanionState;
	try {
		using device = Device.open(await openLibrary("cpu"), { threads: data.threads });
		using run = await openRank(data.configuration, device, data.rank, { phase() {}, transfer() {}, imbalance: 1 });
		run.initialise();
		run.step(1);
		Atomics.compareExchange(word, 0, starting, working);
		while (Atomics.load(word, 0) === working) run.step(1);
	} finally {
		Atomics.store(word, 0, ended);
	}
};
