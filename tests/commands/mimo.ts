/** Runs the compiled program as a user does. */
import { join } from "node:path";

/** The program: `dist/mimo`, or what MIMO_TEST_EXECUTABLE names. */
export const executable = process.env.MIMO_TEST_EXECUTABLE ?? join(import.meta.dir, "../../dist/mimo");

/**
 * Flags that choose the device of a command that computes: the processor, or with MIMO_TEST_DEVICE=cuda a GPU for each rank;
 * with MIMO_TEST_BACKEND=shm ranks share the GPUs that are there.
 */
export const deviceFlags = deviceFlagsOf(process.env.MIMO_TEST_DEVICE, process.env.MIMO_TEST_BACKEND);

export interface Outcome {
	readonly exitCode: number;
	readonly stdout: string;
	readonly stderr: string;
}

function deviceFlagsOf(device: string | undefined, backend: string | undefined): string {
	if (device !== "cuda") return "--device cpu";
	return `--device cuda --distributed-backend ${backend === "shm" ? "shm" : "nccl"}`;
}

/** Runs `dist/mimo ARGS` in `folder`, with extra environment variables. */
export function mimo(args: readonly string[], folder = ".", environment: Record<string, string> = {}): Outcome {
	const { exitCode, stdout, stderr } = Bun.spawnSync([executable, ...args], {
		cwd: folder,
		env: { ...process.env, MIMO_DEBUG: "0", ...environment },
		stdout: "pipe",
		stderr: "pipe",
	});
	return { exitCode, stdout: stdout.toString(), stderr: stderr.toString() };
}
