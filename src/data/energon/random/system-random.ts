/**
 * The three generators of a process that user code draws from: torch's, numpy's and Python's. Energon seeds them with
 * the worker's seed when a worker starts and saves them with its state (docs/spec/energon.md §5.3).
 */
import { NumpyGenerator, type NumpyState } from "./numpy-generator.ts";
import { PythonRandom, type PythonState } from "./python-random.ts";
import { TorchGenerator } from "./torch-generator.ts";

export interface SystemRandomState {
	readonly torch: TorchGenerator;
	readonly numpy: NumpyState;
	readonly python: PythonState;
}

export class SystemRandom {
	readonly torch: TorchGenerator;
	readonly numpy: NumpyGenerator;
	readonly python: PythonRandom;

	constructor(seed: number) {
		this.torch = new TorchGenerator(seed);
		this.numpy = new NumpyGenerator(seed);
		this.python = new PythonRandom(seed);
	}

	seed(seed: number): void {
		this.torch.manualSeed(seed);
		this.numpy.seed(seed);
		this.python.seed(seed);
	}

	state(): SystemRandomState {
		return { torch: this.torch.clone(), numpy: this.numpy.state(), python: this.python.state() };
	}

	restore(state: SystemRandomState): void {
		this.torch.assign(state.torch);
		this.numpy.restore(state.numpy);
		this.python.restore(state.python);
	}
}
