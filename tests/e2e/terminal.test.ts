/** `mimo train` on a terminal: the view while it runs, and what stays of it at the end, after Ctrl-C and after a failure. */
import { expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { deviceFlags, executable } from "../commands/mimo.ts";
import { Screen } from "../observe/screen.ts";
import { SmallRun } from "./small-run.ts";

/** Trains on a terminal of 90 × 40; `when` is called with the screen at every output. */
async function trainOnTerminal(
	run: SmallRun,
	flags: string,
	when: (screen: Screen, terminal: Bun.Terminal, pid: number) => void = () => {},
) {
	const screen = new Screen(90, 40);
	const decoder = new TextDecoder();
	const small = `--preset nemotron-tiny --hidden-size 64 --seq-length 64 --lr-warmup-iters 1 --data-path text.txt ${deviceFlags}`;
	const { NO_COLOR: _, ...environment } = process.env;
	const child = Bun.spawn([executable, "train", ...`${small} ${flags}`.split(" ")], {
		cwd: run.folder,
		env: { ...environment, TERM: "xterm-256color", MIMO_DEBUG: "0" },
		terminal: {
			cols: screen.columns,
			rows: screen.rows,
			data: (terminal, bytes) => {
				screen.write(decoder.decode(bytes, { stream: true }));
				when(screen, terminal, child.pid);
			},
		},
	});
	const exitCode = await child.exited;
	child.terminal!.close();
	return { exitCode, rows: screen.text, written: screen.written };
}

/** Index of the row with the progress bar. */
const barIn = (rows: readonly string[]) => rows.findIndex((row) => /^[█░]{24} /.test(row));

test("a run has lines of one row, the view stays once above what is said at the end", async () => {
	using run = new SmallRun();
	const { exitCode, rows, written } = await trainOnTerminal(run, "--train-iters 12 --log-interval 4 --log-json log");
	expect(exitCode).toBe(0);
	const lines = rows.filter((row) => row.startsWith("iteration "));
	expect(lines.map((row) => /^iteration +(\d+)\/12 \| lm loss /.exec(row)?.[1])).toEqual(["1", "4", "8", "12"]);
	const bar = barIn(rows);
	expect(rows.filter((row) => /[█░]{24}/.test(row))).toHaveLength(1);
	expect(rows[bar]).toContain("12/12  100 %");
	expect(rows[bar + 1]).toMatch(/^lm loss [\d.]+ \| [\d,]+ tokens\/s \| [\d.]+ ms a step \| memory /);
	expect(rows.slice(bar + 6).map((row) => row.split(" ")[0])).toEqual([
		"Trained",
		"Held-out",
		"Held-out",
		"The",
		"Files:",
	]);
	expect(written).toContain("\u001b[36m█");
	// The log is that of any run.
	const logged = readFileSync(run.path("log"), "utf8").trim().split("\n");
	expect(logged.filter((line) => line.includes('"iteration":'))).toHaveLength(12);
}, 60_000);

test("Ctrl-C leaves the view above the sentences about the end", async () => {
	using run = new SmallRun();
	let asked = false;
	const { exitCode, rows } = await trainOnTerminal(run, "--train-iters 100000", (screen, terminal) => {
		if (asked || barIn(screen.text) < 0) return;
		asked = true;
		terminal.write("\u0003");
	});
	expect(exitCode).toBe(130);
	const bar = barIn(rows);
	const announced = rows.findIndex((row) => row.startsWith("mimo: Interrupted: the run stops after this step"));
	expect(announced).toBeGreaterThan(0);
	expect(bar).toBeGreaterThan(announced);
	expect(rows.slice(bar + 6).map((row) => row.split(" ")[0])).toEqual(["Trained", "Interrupted:", "The"]);
	expect(rows.join("")).not.toContain("^C");
}, 60_000);

test("when a rank is killed, the diagnosis is the last that the terminal shows", async () => {
	using run = new SmallRun();
	let killed = false;
	const { exitCode, rows } = await trainOnTerminal(run, "--train-iters 100000 --llm-tp 2", (screen) => {
		if (killed || barIn(screen.text) < 0) return;
		killed = true;
		process.kill(Number(/rank 0: pid (\d+)/.exec(screen.text.join("\n"))![1]), "SIGKILL");
	});
	expect(exitCode).toBe(1);
	const diagnosis = rows.findIndex((row) => row.startsWith("mimo: rank 0 (language, "));
	expect(rows.slice(diagnosis).join("")).toMatch(/it was killed by SIGKILL.* rank 1 .*for rank 0\.$/);
	expect(barIn(rows)).toBeLessThan(diagnosis);
}, 60_000);
