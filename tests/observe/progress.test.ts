import { expect, test } from "bun:test";
import { beforeLine, duration, Terminal } from "../../src/observe/progress.ts";
import { Screen } from "./screen.ts";

test("the block stays below the lines, is overwritten in place, and is gone when it is removed", () => {
	const screen = new Screen(40, 10);
	const terminal = new Terminal(screen);
	terminal.line("First.");
	terminal.show(["", "one", "two"]);
	expect(screen.text).toEqual(["First.", "", "one", "two"]);
	expect(screen.cursor).toEqual({ row: 1, column: 0 });
	terminal.line(`A line of more than one row: ${"x".repeat(30)}`);
	expect(screen.text).toEqual([
		"First.",
		`A line of more than one row: ${"x".repeat(11)}`,
		"x".repeat(19),
		"",
		"one",
		"two",
	]);
	terminal.show(["", "1"]);
	expect(screen.text.slice(3)).toEqual(["", "1"]);
	terminal.show([]);
	terminal.line("Last.");
	expect(screen.text.slice(2)).toEqual(["x".repeat(19), "Last."]);
});

test("no row of a block is empty while it is drawn anew", () => {
	const screen = new Screen(40, 10);
	const terminal = new Terminal(screen);
	terminal.show(["first", "second"]);
	screen.written = "";
	terminal.show(["third", "fourth"]);
	// What is cleared stands behind the new text of its row.
	expect(screen.written.indexOf("\u001b[")).toBe("\rthird".length);
	screen.written = "";
	terminal.show(["third", "fourth"]);
	expect(screen.written).toBe("");
});

test("rows are cut to the width in columns, with wide characters and colours", () => {
	const screen = new Screen(10, 10);
	new Terminal(screen).show(["\u001b[36m0123456789012\u001b[0m", "日本語日本語"]);
	expect(screen.text).toEqual(["012345678", "日本語日"]);
});

test("a block at the foot of the screen scrolls, and its release leaves it above what follows", () => {
	const screen = new Screen(20, 4);
	const terminal = new Terminal(screen);
	for (let line = 0; line < 6; line++) terminal.line(`line ${line}`);
	terminal.show(["a", "b", "c"]);
	terminal.line("line 6");
	terminal.release();
	terminal.line("after");
	expect(screen.text.slice(-5)).toEqual(["line 6", "a", "b", "c", "after"]);
});

test("the cursor rests behind a single row", () => {
	const screen = new Screen(20, 4);
	const terminal = new Terminal(screen);
	terminal.show(["first row"]);
	terminal.show(["row"]);
	expect([screen.text, screen.cursor]).toEqual([["row"], { row: 0, column: 3 }]);
	terminal.line("A line.");
	expect(screen.text).toEqual(["A line.", "row"]);
});

test("another writer's line takes the block's place until it is drawn anew below", () => {
	const screen = new Screen(30, 10);
	const terminal = new Terminal(screen);
	terminal.show(["", "bar 1", "facts"]);
	screen.write(`${beforeLine(screen)}[rank 1] a line\n`);
	expect(screen.text).toEqual(["[rank 1] a line"]);
	terminal.show(["", "bar 2", "facts"]);
	expect(screen.text).toEqual(["[rank 1] a line", "", "bar 2", "facts"]);
});

test("where there is no terminal, there is no block, and other writers' lines are unchanged", () => {
	const written: string[] = [];
	const output = { isTTY: false, write: (text: string) => written.push(text) };
	const terminal = new Terminal(output);
	terminal.show(["a"]);
	terminal.line("A line.");
	terminal.release();
	expect(written).toEqual(["A line.\n"]);
	expect(beforeLine(output)).toBe("");
});

test("durations", () => {
	expect([0, 65, 3599.6, 7384].map(duration)).toEqual(["0:00", "1:05", "1:00:00", "2:03:04"]);
});
