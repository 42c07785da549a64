import { readRunLog } from "../../../src/observe/run-log/reader.ts";
import { FileInput } from "../file-input.ts";
import type { FuzzParser } from "../parser.ts";

const records = [
	{ event: "start", time: "2026-01-02T03:04:05.000Z", configuration: { preset: "nemotron-tiny" }, ranks: 2 },
	{
		...{ iteration: 1, time: "2026-01-02T03:04:06.000Z", "lm loss": 5.5, "grad norm": 0.5, step_ms: 20, tokens: 512 },
		...{
			modules: [{ name: "language", ranks: 2, parts: { forward: 8, backward: 10 }, tflops: 0.1, slowest: { rank: 1 } }],
		},
		...{ experts: { "5": [3, 4, 5, 0] } },
	},
	{ iteration: 1, split: "validation", "lm loss": 5.4, time: "2026-01-02T03:04:07.000Z" },
	{ event: "checkpoint", iteration: 1, path: "ck/iter_0000001", seconds: 0.2 },
];

export default {
	about: "a run's JSON log as a report reads it",
	open: () => {
		const file = new FileInput(".jsonl");
		return {
			json: true,
			seeds: [Buffer.from(`${records.map((record) => JSON.stringify(record)).join("\n")}\n`)],
			dictionary: ['"iteration":', '"split":', '"event":"start"', '"modules":[', '"parts":{', "\n", "{}", "null\n"],
			parse: (bytes) => readRunLog(file.with(bytes)),
			[Symbol.dispose]: () => file[Symbol.dispose](),
		};
	},
} satisfies FuzzParser;
