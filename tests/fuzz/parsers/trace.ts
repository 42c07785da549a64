import { readTrace, summariseTrace } from "../../../src/observe/trace/summary.ts";
import { FileInput } from "../file-input.ts";
import type { FuzzParser } from "../parser.ts";

const trace = {
	traceEvents: [
		{ name: "process_name", ph: "M", pid: 0, args: { name: "rank 0: language" } },
		{ name: "thread_name", ph: "M", pid: 0, tid: 1, args: { name: "step" } },
		{ name: "forward", cat: "step", ph: "X", pid: 0, tid: 1, ts: 10, dur: 20, args: { step: 3 } },
		{ name: "all_reduce", cat: "collectives", ph: "X", pid: 0, tid: 2, ts: 12, dur: 4, args: { bytes: 4096 } },
	],
};

export default {
	about: "a trace of mimo train, and its summary",
	open: () => {
		const file = new FileInput(".json");
		return {
			json: true,
			seeds: [Buffer.from(JSON.stringify(trace))],
			dictionary: ['"ph":"X"', '"cat":"step"', '"ts":', '"dur":', '"args":'],
			parse: (bytes) => summariseTrace(readTrace(file.with(bytes))),
			[Symbol.dispose]: () => file[Symbol.dispose](),
		};
	},
} satisfies FuzzParser;
