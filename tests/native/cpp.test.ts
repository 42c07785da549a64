/** Builds and runs the C++ programs of cuda/tests: parts that the ABI does not show. */
import { beforeAll, describe, expect, test } from "bun:test";
import { existsSync } from "node:fs";
import { join } from "node:path";
import { buildTree, sanitizerEnvironment } from "../sanitizer.ts";

const root = join(import.meta.dir, "../..");
const underSanitizers = join(root, "build/sanitize");
/** .ci/run compiles the programs once, for the sanitizers, which it tests first. */
const once = process.env.CI === "true" && existsSync(join(underSanitizers, "tests/philox_test"));
/** The programs are linked with the objects of the library that is tested. */
const tree = once ? underSanitizers : buildTree(root);
const environment = once ? { ...process.env, ...sanitizerEnvironment(root) } : process.env;

/** Of a compiler: under a sanitizer's run time it takes twice as long. */
const plain = { ...process.env, LD_PRELOAD: "" };

function run(command: string[], env: NodeJS.ProcessEnv): string {
	const result = Bun.spawnSync(command, { cwd: root, stdout: "pipe", stderr: "pipe", env });
	const output = `${result.stdout}${result.stderr}`;
	if (!result.success) throw new Error(`${command.join(" ")} ended with ${result.exitCode}:\n${output}`);
	return output;
}

describe("C++ test programs", () => {
	beforeAll(() => {
		run(["ninja", "-C", tree, "cpp_tests"], plain);
	}, 240_000);

	const relays = ["relay", "relay_link", "relay_authentication"];
	const between = ["group", "tensor_memory", "recording"];
	const parts = ["philox", "thread_pool", "sha256", "operation_queue", ...between, ...relays];
	for (const program of parts.map((part) => `${part}_test`)) {
		test(program, () => {
			expect(run([join(tree, "tests", program)], environment)).toBe("");
		}, 60_000);
	}
});
