/** `--timing-log-level` on disjoint grids: every rank's timers come with the log lines and reach TensorBoard. */
import { expect, test } from "bun:test";
import { readScalars } from "../../src/observe/tensorboard.ts";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { SmallRun } from "./small-run.ts";

test("timers of encoder and language model follow the log lines they belong to", () => {
	using run = new SmallRun();
	const { exitCode, stdout, stderr } = mimo(
		`train --preset nemotron-vlm-tiny --hidden-size 64 --vision-num-layers 1 --vision-hidden-size 32 --seq-length 32 --global-batch-size 4 --llm-offset 1 --lr-warmup-iters 0 --train-iters 4 --log-interval 2 ${deviceFlags} --timing-log-level 2 --timing-log-option all --log-num-zeros-in-grad --tensorboard-dir events --log-timers-to-tensorboard`.split(
			" ",
		),
		run.folder,
	);
	expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	const blocks = stdout.split("times across ranks (ms):\n").slice(1);
	expect(blocks.length).toBe(3);
	const ranksOf = (name: string) =>
		[
			...(new RegExp(`^  ${name}:\\n((?:     rank .*\\n)+)`, "m").exec(blocks[1]!)?.[1] ?? "").matchAll(
				/rank +(\d+): ([\d.]+)/g,
			),
		].map(([, rank, milliseconds]) => [Number(rank), Number(milliseconds)] as const);
	const both = ["forward-backward", "forward-compute", "backward-compute", "batch-generator", "all-grads-sync"];
	for (const name of [...both, "optimizer", "optimizer-inner-step", "optimizer-count-zeros"]) {
		expect([name, ranksOf(name).map(([rank]) => rank)]).toEqual([name, [0, 1]]);
	}
	for (const name of ["forward-send", "backward-recv"]) expect([name, ranksOf(name)[0]![0]]).toEqual([name, 0]);
	for (const name of ["forward-recv", "backward-send"]) expect([name, ranksOf(name)[0]![0]]).toEqual([name, 1]);
	// The parts lie inside the whole.
	for (const rank of [0, 1]) {
		const of = (name: string) => ranksOf(name).find(([one]) => one === rank)?.[1] ?? 0;
		const parts = ["forward-compute", "backward-compute", "forward-recv", "forward-send", "backward-recv"].map(of);
		const sum = parts.reduce((total, value) => total + value, of("backward-send") + of("all-grads-sync"));
		expect(sum).toBeLessThanOrEqual(of("forward-backward") + 0.1);
		expect(sum).toBeGreaterThan(0.5 * of("forward-backward"));
	}
	expect(readScalars(run.path("events")).get("forward-backward-time")?.size).toBe(3);
}, 60_000);
