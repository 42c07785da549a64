/** When a failed run goes on in its job. */
import { expect, test } from "bun:test";
import { type Failure, RestartPolicy } from "../../src/launch/restart-policy.ts";

const minute = 60_000;
const killed: Failure = { rank: 1, reason: "it was killed by SIGKILL", step: 7, own: false };
const threw: Failure = { rank: 1, reason: "Sample 17 of images.tar holds no image.", step: 7, own: true };

test("restarts count within a window", () => {
	const policy = new RestartPolicy({ most: 2, windowMinutes: 10 });
	expect(policy.refusal(killed, 0)).toBeNull();
	expect(policy.sentence([2, 1])).toBe("Restart 1 of at most 2 within 10 minutes: new processes for ranks 1 and 2");
	expect(policy.refusal(killed, 9 * minute)).toBeNull();
	expect(policy.sentence([])).toBe("Restart 2 of at most 2 within 10 minutes: every rank keeps its process");
	expect(policy.refusal(killed, 9 * minute)).toBe(
		"The run is not restarted: it was restarted 2 times within 10 minutes (max-restarts).",
	);
	expect(policy.refusal(killed, 10 * minute)).toBeNull();
	expect(policy.sentence([0])).toBe("Restart 2 of at most 2 within 10 minutes: a new process for rank 0");
});

test("an error of the program itself ends the run when it comes again", () => {
	const policy = new RestartPolicy({ most: 9, windowMinutes: 10 });
	expect(policy.refusal(threw, 0)).toBeNull();
	expect(policy.refusal({ ...threw, step: 8 }, 0)).toBeNull();
	expect(policy.refusal({ ...threw, step: 8, reason: "Sample 18 of images.tar holds no image." }, 0)).toBeNull();
	expect(policy.refusal({ ...threw, step: 8 }, 0)).toBeNull();
	expect(policy.refusal({ ...threw, step: 8, rank: 0 }, 0)).toBe(
		"The run is not restarted: it has failed twice after step 8 for the same reason.",
	);
	expect(policy.refusal(killed, 0)).toBeNull();
	expect(policy.refusal(killed, 0)).toBeNull();
});

test("an error before the job's first step ends the run at once, as missing data do", () => {
	const policy = new RestartPolicy({ most: 9, windowMinutes: 10 });
	expect(policy.refusal({ ...killed, step: 0 }, 0)).toBeNull();
	expect(policy.refusal({ ...threw, step: 0 }, 0)).toBe(
		"The run is not restarted: it failed before its first step was done.",
	);
	expect(policy.refusal(killed, 0)).toBeNull();
	expect(policy.refusal({ ...threw, step: 0 }, 0)).toBeNull();
	expect(policy.refusal({ ...threw, step: 0 }, 0)).toBe(
		"The run is not restarted: it has failed twice after step 0 for the same reason.",
	);
});
