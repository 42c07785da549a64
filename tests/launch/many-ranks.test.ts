/** Starting many ranks: more than the host's memory holds, and signals while they start. */
import { expect, test } from "bun:test";
import { requireRoom } from "../../src/commands/ranks.ts";
import { identityOf } from "../../src/launch/join.ts";
import { launch } from "../../src/launch/launcher.ts";
import { openLibraryOf } from "../../src/native/open-device.ts";

const library = await openLibraryOf("cpu");

/** Launches `ranks` processes of `command`; returns the exit code and the lines about failures. */
async function launched(command: readonly string[], ranks: number, onDescribe: (rank: number) => void) {
	const failures: string[] = [];
	const exitCode = await launch({
		command,
		ranks,
		library,
		identity: identityOf(null, ranks, { library, configuration: {}, version: "test" }),
		describe: (rank) => {
			onDescribe(rank);
			return { module: "language", coordinates: `dp ${rank}` };
		},
		reporter: ranks - 1,
		timeoutMinutes: 1,
		log: (line, kind) => {
			if (kind === "failure") failures.push(line);
		},
	});
	return { exitCode, failures };
}

test("ranks that the host's memory cannot hold are refused before any starts", () => {
	requireRoom(1, 2 ** 20);
	requireRoom(384, 24 * 2 ** 30);
	expect(() => requireRoom(385, 24 * 2 ** 30)).toThrow(
		"The configured grids need 385 ranks, and this host's memory of 24.0 GiB holds 384 processes at most; torchrun or srun start ranks on several hosts.",
	);
});

test("a signal stops the start of further ranks", async () => {
	const started = new Set<number>();
	const { exitCode, failures } = await launched(["/bin/sleep", "60"], 64, (rank) => {
		if (rank === 5 && !started.has(rank)) process.kill(process.pid, "SIGTERM");
		started.add(rank);
	});
	expect([exitCode, failures]).toEqual([143, ["The run was interrupted by SIGTERM."]]);
	expect(started.size).toBeLessThan(64);
});

test("Ctrl-C that ends ranks before it reaches the launcher is an interruption, not a rank's failure", async () => {
	setTimeout(() => process.kill(process.pid, "SIGINT"), 50);
	const { exitCode, failures } = await launched(["/bin/sh", "-c", "kill -INT $$"], 2, () => {});
	expect([exitCode, failures]).toEqual([130, ["The run was interrupted by SIGINT."]]);
});
