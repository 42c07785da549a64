/** A tracer's notes come back unchanged, in order, over more than one piece of memory. */
import { expect, test } from "bun:test";
import { EventLog } from "../../src/observe/trace/tracer.ts";

test("each text has its own number and keeps it", () => {
	const log = new EventLog();
	const numbers = ["gemm", "", "add", "gemm", ""].map((text) => log.number(text));
	expect(numbers).toEqual([0, 1, 2, 0, 1]);
	expect(numbers.map((number) => log.text(number))).toEqual(["gemm", "", "add", "gemm", ""]);
});

test("events come back in order, with times and bytes that need all of a double", () => {
	const log = new EventLog();
	expect(log.events()).toEqual([]);
	const events = Array.from({ length: 10_000 }, (_, i) => ({
		row: (i % 5) - 1,
		name: i % 7,
		began: i + 0.000123,
		ended: i + 0.25,
		scope: i % 3,
		details: [i * 2 ** 40 + 1, 0, i] as [number, number, number],
	}));
	for (const { row, name, began, ended, scope, details } of events) log.add(row, name, began, ended, scope, ...details);
	log.add(1, 2, 3, 4, 5);
	expect(log.events()).toEqual([...events, { row: 1, name: 2, began: 3, ended: 4, scope: 5, details: [0, 0, 0] }]);
});
