/** What the training loop reports after each step, and the Observer interface that receives it. */

/** Seconds of a step by part; the parts add up to the step. */
export interface StepSeconds {
	/** Forward and backward passes, collectives inside a module's layers included. */
	readonly compute: number;
	/** Waiting for rows or gradients of the other module. */
	readonly bridge: number;
	/** Waiting until all ranks have done their passes. */
	readonly wait: number;
	/** Summing gradients over replicas, gathering parameters. */
	readonly gradients: number;
	/** Zeroing gradients, norm, clipping, update. */
	readonly optimizer: number;
	/** Waiting for samples. */
	readonly data: number;
	/** Everything else of the loop. */
	readonly other: number;
}

/** One module's step: means over its ranks. */
export interface ModuleReport {
	/** "radio_encoder" or "language". */
	readonly name: string;
	readonly ranks: number;
	readonly seconds: StepSeconds;
	/** Floating-point operations of the whole module, forward and backward; 0 where they are not counted. */
	readonly flops: number;
	/** Share of the step in which its ranks wait for the other module or each other's end. */
	readonly idle: number;
	/** The slowest rank, and its seconds outside of waiting. */
	readonly slowest: { readonly rank: number; readonly busy: number };
}

/** Bytes of device memory of a rank. */
export interface RankMemory {
	readonly allocated: number;
	readonly reserved: number;
	readonly peak: number;
}

/** Values by layer, from 0. */
export type ByLayer<Value> = ReadonlyMap<number, Value>;

export interface StepReport {
	/** From 1. */
	readonly iteration: number;
	/** Samples consumed so far, this step included. */
	readonly consumedSamples: number;
	/** Samples skipped so far. */
	readonly skippedSamples: number;
	readonly globalBatchSize: number;
	/** Tokens the step trained on. */
	readonly tokens: number;
	/** Part of them that only fills sequences up to their length; absent where no sequence is filled up. */
	readonly padding?: number;
	/** Wall-clock time of the step, without saving and evaluation. */
	readonly seconds: number;
	/** Learning rate this step used. */
	readonly learningRate: number;
	/** Learning rate of the next step, which Megatron prints. */
	readonly nextLearningRate: number;
	/** Means of the step by Megatron's name, "lm loss" first. */
	readonly losses: Readonly<Record<string, number>>;
	readonly lossScale: number;
	/** Global norm before clipping; null when the step was skipped. */
	readonly gradNorm: number | null;
	/** Zero gradients; null when not counted. */
	readonly numZeros: number | null;
	/** Norm of all parameters; null when not computed. */
	readonly paramsNorm: number | null;
	/** The update was left out. */
	readonly skipped: boolean;
	/** Encoder ranks that saw images, and the gradient norm under either policy; null without an encoder. */
	readonly participation: {
		readonly participants: number;
		readonly ranks: number;
		readonly exactNorm: number;
		readonly correctedNorm: number;
	} | null;
	/** Absent where it is not measured. */
	readonly modules?: readonly ModuleReport[];
	/** By rank. */
	readonly memory?: readonly RankMemory[];
	/** Balancing losses by Megatron's name and layer. */
	readonly layerLosses?: Readonly<Record<string, ByLayer<number>>>;
	/** Tokens sent to each expert in this step, over all ranks. */
	readonly tokensPerExpert?: ByLayer<readonly number[]>;
}

export interface EvaluationReport {
	readonly iteration: number;
	/** Training samples so far. */
	readonly consumedSamples?: number;
	/** "validation" or "test". */
	readonly split: "validation" | "test";
	/** Megatron's words for when: "iteration 100", "iteration 300 on test set". */
	readonly label: string;
	/** Means over the evaluation, by name. */
	readonly losses: Readonly<Record<string, number>>;
}

/** How timers of ranks are shown: the least and the most, the most, every one. */
export type TimingOption = "minmax" | "max" | "all";

/** Megatron's timers since the last log line. */
export interface TimersReport {
	readonly iteration: number;
	readonly option: TimingOption;
	/** Mean seconds of a step, by timer and rank; 0 where a rank has not used it. */
	readonly seconds: ReadonlyMap<string, readonly number[]>;
}

/** How this process begins a training, or goes on with it. */
export interface TrainingStart {
	/** Steps done by then. */
	readonly step: number;
	/** 64 hexadecimal digits, equal in every process of one training: a run that goes on from its checkpoints finds its records. */
	readonly training: string;
	/** Every key with a value. */
	readonly configuration: Readonly<Record<string, unknown>>;
}

/** Something that happens between steps, for the log that a report is made from. */
export interface RunEvent {
	readonly kind: "start" | "save" | "stop" | "data" | "budgets" | "failure" | "end";
	/** Steps done by then; null: as many as were reported. */
	readonly step: number | null;
	readonly sentence: string;
	/** More that the log keeps: configuration and topology of a start. */
	readonly details?: Readonly<Record<string, unknown>>;
}

/** A sink that shows or stores a training. Calls come in the order of events. */
export interface Observer {
	/** Before the first step. */
	begin?(start: TrainingStart): void;
	step(report: StepReport): void;
	evaluation(report: EvaluationReport): void;
	/** A sentence for the user. */
	note(sentence: string): void;
	/** After a step's report, where timers are asked for. */
	timers?(report: TimersReport): void;
	/** For reporters that keep a record. */
	event?(event: RunEvent): void;
	close(): void;
}

/** An observer that forwards everything to others, in order. */
export function together(observers: readonly Observer[]): Observer {
	return {
		begin: (start) => {
			for (const observer of observers) observer.begin?.(start);
		},
		step: (report) => {
			for (const observer of observers) observer.step(report);
		},
		evaluation: (report) => {
			for (const observer of observers) observer.evaluation(report);
		},
		note: (sentence) => {
			for (const observer of observers) observer.note(sentence);
		},
		timers: (report) => {
			for (const observer of observers) observer.timers?.(report);
		},
		event: (event) => {
			for (const observer of observers) observer.event?.(event);
		},
		close: () => {
			for (const observer of observers) observer.close();
		},
	};
}
