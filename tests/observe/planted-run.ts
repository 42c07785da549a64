/**
 * The log of a run of 200 steps in which things happen: a spike of the loss, a stalled rank, a stop and a resume.
 *
 *   bun tests/observe/planted-run.ts FOLDER     leaves FOLDER/run.jsonl, for `mimo report FOLDER`
 */
import { join } from "node:path";
import { JsonLog } from "../../src/observe/run-log/writer.ts";
import type { ModuleReport } from "../../src/observe/step-report.ts";
import { step } from "./step.ts";

/** When it begins. */
export const clock = Date.parse("2026-01-31T09:00:00Z");
const topology = {
	worldSize: 3,
	modules: [
		{ name: "radio_encoder", size: 1, sizes: { tp: 1 }, lanes: [[0]] },
		{ name: "language", size: 2, sizes: { tp: 2 }, lanes: [[1, 2]] },
	],
};

function moduleAt(iteration: number, name: string, stalled: boolean): ModuleReport {
	const seconds = {
		compute: stalled ? 0.4 : 0.1,
		bridge: 0.05,
		wait: 0,
		gradients: 0.01,
		optimizer: 0.02,
		data: 0,
		other: 0.01,
	};
	const rank = name === "language" ? (stalled ? 2 : 1 + (iteration % 2)) : 0;
	return { name, ranks: name === "language" ? 2 : 1, seconds, flops: 2e9, idle: 0.2, slowest: { rank, busy: 0.5 } };
}

/** 200 steps with a spike at 95, a stalled rank from 60 to 74, a stop at 140 and a resume from 100. */
export function plantedRun(folder: string): string {
	const file = join(folder, "run.jsonl");
	let now = clock;
	const log = new JsonLog(file, () => new Date(now));
	const start = (at: number, sentence: string) => {
		const details = { train_iterations: 200, configuration: { lr: 3e-3, save: "<checkpoints>" }, topology };
		log.event({ kind: "start", step: at, sentence, details });
	};
	const train = (iteration: number) => {
		now += 200;
		const stalled = iteration >= 60 && iteration < 75;
		log.step(
			step({
				iteration,
				losses: { "lm loss": 2 + 4 * Math.exp(-iteration / 60) + (iteration === 95 ? 3 : 0) },
				gradNorm: iteration === 95 ? 17.5 : 1.25,
				modules: [moduleAt(iteration, "radio_encoder", false), moduleAt(iteration, "language", stalled)],
				memory: [0, 1, 2].map((rank) => ({ allocated: 2 ** 20, reserved: 2 ** 23, peak: (rank + 1) * 2 ** 21 })),
				tokensPerExpert: new Map([[3, [100, 50, 25, 25]]]),
			}),
		);
	};
	start(0, "new run");
	for (let iteration = 1; iteration <= 140; iteration++) train(iteration);
	log.event({ kind: "save", step: 100, sentence: "checkpoints/iter_0000100" });
	log.event({ kind: "stop", step: 140, sentence: "SIGTERM" });
	start(100, "resumed from checkpoints/iter_0000100");
	for (let iteration = 101; iteration <= 200; iteration++) train(iteration);
	log.evaluation({ iteration: 200, split: "validation", label: "", losses: { "lm loss": 2.61 } });
	log.close();
	return file;
}

if (import.meta.main) console.log(plantedRun(process.argv[2] ?? "."));
