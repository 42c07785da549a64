/** Megatron's timers: which level measures what, and its text. */
import { expect, test } from "bun:test";
import { formatTimers, Timers, timed } from "../../src/observe/timers.ts";

test("a level measures its timers and those of lower levels, after waiting for the device", () => {
	let [clock, settled] = [0, 0];
	const timers = new Timers(
		1,
		() => settled++,
		() => clock,
	);
	for (let step = 0; step < 2; step++) {
		timers.start("forward-backward");
		const result = timed(timers, "forward-compute", () => {
			clock += 30;
			return 7;
		});
		expect(result).toBe(7);
		timers.stop("forward-backward");
	}
	expect([timers.seconds("forward-backward"), timers.seconds("forward-compute"), settled]).toEqual([0.06, 0, 4]);
	timers.reset();
	expect(timers.seconds("forward-backward")).toBe(0);
	expect(timed(undefined, "optimizer", () => 3)).toBe(3);
});

test("the text is Megatron's; ranks without a timer do not count", () => {
	const seconds = new Map([
		["forward-backward", [0.0783, 0.0812]],
		["forward-recv", [0, 0.00123]],
		["optimizer-count-zeros", [0, 0]],
	]);
	const text = (option: "minmax" | "max" | "all") => formatTimers({ iteration: 1, option, seconds });
	expect(text("minmax")).toBe(
		[
			"(min, max) time across ranks (ms):",
			"    forward-backward ...............................: (78.30, 81.20)",
			"    forward-recv ...................................: (1.23, 1.23)",
		].join("\n"),
	);
	expect(text("max")).toBe(
		[
			"max time across ranks (ms):",
			"    forward-backward ...............................: 81.20",
			"    forward-recv ...................................: 1.23",
		].join("\n"),
	);
	expect(text("all")).toBe(
		[
			"times across ranks (ms):",
			"  forward-backward:",
			"     rank  0: 78.30",
			"     rank  1: 81.20",
			"  forward-recv:",
			"     rank  1: 1.23",
		].join("\n"),
	);
	expect(formatTimers({ iteration: 1, option: "all", seconds: new Map([["optimizer", [0, 0]]]) })).toBeNull();
});
