/** `mimo chat`: turns, commands and pictures in a pipe and on a terminal. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { deviceFlags, executable, mimo } from "../commands/mimo.ts";
import { png, Scratch } from "../data/fixtures.ts";

const folder = new Scratch();
afterAll(() => folder[Symbol.dispose]());

beforeAll(() => {
	folder.file("a.png", png(20, 30, 1));
	folder.file("b c.png", png(30, 20, 2));
	const small = `--preset nemotron-vlm-tiny --hidden-size 64 --vision-num-layers 1 --vision-hidden-size 32 --seq-length 128 --micro-batch-size 2 --global-batch-size 8 --lr-warmup-iters 0 --train-iters 1 --init-method-std 0.4 --img-h 32 --img-w 32 --llm-offset 0`;
	const format = `--conversation-template chatml --image-tag-type internvl --max-position-embeddings 65536 --save model --save-interval 1`;
	const { exitCode, stderr } = mimo(["train", ...`${small} ${format} ${deviceFlags}`.split(" ")], folder.path);
	expect([exitCode, stderr]).toEqual([0, ""]);
}, 60_000);

/** The answers of a conversation whose lines come from a pipe. */
function chat(lines: readonly string[], ...flags: string[]) {
	const args = ["chat", "--load", "model", "--max-new-tokens", "40", ...flags, ...deviceFlags.split(" ")];
	const { exitCode, stdout, stderr } = Bun.spawnSync([executable, ...args], {
		...{ cwd: folder.path, stdin: Buffer.from(lines.map((line) => `${line}\n`).join("")) },
		...{ stdout: "pipe", stderr: "pipe" },
	});
	return { exitCode, stdout: stdout.toString(), stderr: stderr.toString() };
}

/** The answer of `mimo generate` to one turn. */
function answer(prompt: string, ...images: string[]): string {
	const shown = images.flatMap((image) => ["--image", image]);
	const args = ["generate", "--load", "model", "--max-new-tokens", "40", "--chat", "--prompt", prompt, ...shown];
	return mimo([...args, ...deviceFlags.split(" ")], folder.path).stdout;
}

test("a turn's pictures are those of generate, /reset forgets, /exit ends", () => {
	const lines = ["/image a.png", '/image "b c.png"', "hi", "", "/reset", "hi", "/exit", "never said"];
	const pair = answer("hi", "a.png", "b c.png");
	const alone = answer("hi");
	expect(alone).not.toBe(pair);
	expect(chat(lines)).toEqual({ exitCode: 0, stdout: `${pair}${alone}`, stderr: "" });
	// A tag says where the picture goes; --image shows it with the first turn.
	const tagged = answer("first <image> last", "a.png");
	expect(chat(["first <image> last"], "--image", "a.png").stdout).toBe(tagged);
	// A later picture does not move to the first turn.
	const [first, second] = [chat(["hi", "/image a.png", "hi"]), chat(["/image a.png", "hi", "hi"])];
	expect([first.exitCode, second.exitCode]).toEqual([0, 0]);
	expect(first.stdout.startsWith(alone)).toBe(true);
	expect(second.stdout.startsWith(answer("hi", "a.png"))).toBe(true);
}, 60_000);

test("in a pipe a mistake ends the program with one sentence", () => {
	expect(chat(["/image none.png", "hi"])).toEqual({
		...{ exitCode: 1, stdout: "" },
		stderr: "mimo: Cannot open the image none.png of the conversation: it does not exist.\n",
	});
	expect(chat(["/imagine a.png"]).stderr).toBe(
		"mimo: /imagine a.png is no command: /image PATH adds a picture to the next turn, /reset forgets all turns, /exit ends.\n",
	);
	expect(chat(["hi"], "--llm-tp", "2").stderr).toBe(
		"mimo: A conversation runs in one process alone: leave out the flags of grids.\n",
	);
}, 30_000);

test("on a terminal a mistake is told and the conversation goes on, and Ctrl-C stops an answer", async () => {
	let shown = "";
	/** What is typed at the prompts, in order. */
	const typed = ["/image none.png\r", "why\r", "/exit\r"];
	let prompts = 0;
	let isStopped = false;
	const args = ["generate", "--load", "model", "--chat", "--max-new-tokens", "60000", ...deviceFlags.split(" ")];
	const child = Bun.spawn([executable, ...args], {
		cwd: folder.path,
		terminal: {
			...{ cols: 200, rows: 40 },
			data: (terminal, bytes) => {
				const text = Buffer.from(bytes).toString("latin1");
				shown += text;
				if (text.endsWith("> ") && prompts < typed.length) terminal.write(typed[prompts++]!);
				else if (prompts === 2 && !isStopped && !text.includes("why")) {
					isStopped = true;
					terminal.write("\u0003");
				}
			},
		},
	});
	expect(await child.exited).toBe(0);
	child.terminal!.close();
	const text = Bun.stripANSI(shown);
	expect(text).toContain(
		"Model: model.\r\n/image PATH adds a picture to the next turn, /reset forgets all turns, /exit ends, Ctrl-C",
	);
	expect(text).toContain("mimo: Cannot open the image none.png of the conversation: it does not exist.\r\n> why\r\n");
	expect(isStopped).toBe(true);
	expect(Number(/, decode (\d+) tokens/.exec(text)![1])).toBeLessThan(30000);
}, 120_000);
