/** A step's parts and their times. */
import { expect, test } from "bun:test";
import { hostTimestamps, StepClock } from "../../src/observe/timers.ts";

test("time counts for the part that was entered last", () => {
	let now = 0;
	const clock = new StepClock(hostTimestamps(() => now));
	const at = (milliseconds: number) => {
		now = milliseconds;
	};
	for (const begin of [100, 5000]) {
		const seen: [string, number, number][] = [];
		clock.watch((part, began, ended) => seen.push([part, began, ended]));
		at(begin);
		clock.start("data");
		at(begin + 10);
		clock.enter("compute");
		at(begin + 250);
		clock.enter("bridge");
		at(begin + 300);
		clock.enter("compute");
		at(begin + 1300);
		const { data, compute, bridge, other } = clock.stop();
		expect([data, compute, bridge, other]).toEqual([0.01, 1.24, 0.05, 0]);
		expect(seen).toEqual([
			["data", begin, begin + 10],
			["compute", begin + 10, begin + 250],
			["bridge", begin + 250, begin + 300],
			["compute", begin + 300, begin + 1300],
		]);
	}
});
