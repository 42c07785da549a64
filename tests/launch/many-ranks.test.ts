/** More ranks than a host can hold, and a signal while ranks are still being started. */
import { expect, test } from "bun:test";
import { requireRoom } from "../../src/commands/ranks.ts";
import { identityOf } from "../../src/launch/join.ts";
import { launch } from "../../src/launch/launcher.ts";
import { openLibraryOf } from "../../src/native/open-device.ts";

test("ranks that the host's memory cannot hold are refused before any starts", () => {
	requireRoom(1, 2 ** 20);
	requireRoom(384, 24 * 2 ** 30);
	expect(() => requireRoom(385, 24 * 2 ** 30)).toThrow(
		"The configured grids need 385 ranks, and this host's memory of 24.0 GiB holds 384 processes at most; torchrun or srun start ranks on several hosts.",
	);
});

test("a signal is heard while ranks are being started, and no further one is", async () => {
	const ranks = 64;
	const started = new Set<number>();
	const library = await openLibraryOf("cpu");
	const options = { threads: 1, device: "cpu", backend: "shm", configuration: {}, library, version: "test" } as const;
	const exitCode = await launch({
		command: ["/bin/sleep", "60"],
		ranks,
		library,
		identity: identityOf(null, ranks, options),
		describe: (rank) => {
			if (rank === 5 && !started.has(rank)) process.kill(process.pid, "SIGTERM");
			started.add(rank);
			return { module: "language", coordinates: `dp ${rank}` };
		},
		reporter: ranks - 1,
		timeoutMinutes: 1,
		say: () => {},
	});
	expect(exitCode).toBe(143);
	expect(started.size).toBeLessThan(ranks);
});
