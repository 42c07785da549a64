/**
 * A restricted pickle machine (docs/spec/checkpoint.md §1.3, §2). A pickle is a program; this interpreter runs the
 * opcodes that build plain data, and looks every class or function name up in a fixed table. It calls only functions of that
 * table, sets no properties of JavaScript objects, and refuses any other opcode. Truncated or oversized input is an error
 * without a partial result.
 */
import { Cursor, PickleStack, type StackLimits } from "./operands.ts";
import { Global, NumpyArray, NumpyDtype, PythonObject, Tuple } from "./values.ts";

/** Allowed uses of a global: as a function (REDUCE), as a class to instantiate (NEWOBJ), or as a value. */
export interface AllowedGlobal {
	readonly value?: unknown;
	readonly call?: (args: readonly unknown[]) => unknown;
	readonly create?: (args: readonly unknown[]) => unknown;
}

/** Looks up a global; the pickle is refused where this returns undefined. */
export type AllowedGlobals = (module: string, name: string) => AllowedGlobal | undefined;

export interface PickleLimits extends StackLimits {
	readonly bytes: number;
	readonly string: number;
	/** Containers, strings, instances, entries of dicts and items that calls copy, of about 100 bytes each. */
	readonly values: number;
}

const defaultLimits: PickleLimits = {
	bytes: 2 ** 27,
	stack: 100_000,
	marks: 10_000,
	memo: 2 ** 23,
	string: 2 ** 26,
	values: 2 ** 23,
};

/** Characters of a string that count as one value when a call copies them. */
const CHARACTERS_A_VALUE = 64;
/** Items of a list or tuple that count as one value. */
const ITEMS_A_VALUE = 4;

export interface UnpickleOptions {
	readonly allowed: AllowedGlobals;
	/** The object that a persistent id stands for; absent: persistent ids are refused. */
	readonly persistent?: (id: unknown) => unknown;
	readonly limits?: Partial<PickleLimits>;
}

/** Reads one pickle; `where`, such as "file.pt", begins every error. */
export function unpickle(bytes: Uint8Array, where: string, options: UnpickleOptions): unknown {
	return new Machine(bytes, where, options).run();
}

/** A global on the stack, with its allowed uses. */
class Reference {
	constructor(
		readonly name: Global,
		readonly allowed: AllowedGlobal,
	) {}
}

class Machine {
	readonly #cursor: Cursor;
	readonly #limits: PickleLimits;
	readonly #stack: PickleStack;
	readonly #references = new Map<string, Reference>();
	#values = 0;

	constructor(
		bytes: Uint8Array,
		where: string,
		readonly options: UnpickleOptions,
	) {
		this.#limits = { ...defaultLimits, ...options.limits };
		this.#cursor = new Cursor(bytes, where, this.#limits.string);
		this.#stack = new PickleStack(this.#limits, (reason) => this.#refuse(reason));
		if (bytes.byteLength > this.#limits.bytes) this.#refuse(`it has ${bytes.byteLength} bytes`);
	}

	run(): unknown {
		try {
			for (;;) {
				const opcode = this.#cursor.byte();
				if (opcode === 0x2e) return this.#result();
				this.#step(opcode);
			}
		} catch (error) {
			// setState and functions of allowed globals throw RangeErrors, without the position.
			if (error instanceof RangeError) this.#refuse(error.message);
			throw error;
		}
	}

	#charge(values: number): void {
		this.#values += values;
		if (this.#values > this.#limits.values) this.#refuse(`it makes more than ${this.#limits.values} values`);
	}

	#make(value: unknown): void {
		this.#charge(1);
		this.#stack.push(value);
	}

	#makeOf(items: readonly unknown[], container: (items: unknown[]) => unknown): void {
		this.#charge(items.length / ITEMS_A_VALUE);
		this.#make(container(items.map(plain)));
	}

	#refuse(reason: string): never {
		return this.#cursor.refuse(reason);
	}

	#result(): unknown {
		const value = this.#stack.pop();
		if (!this.#stack.empty) this.#refuse("it ends with more than one value on its stack");
		if (value instanceof Reference && value.allowed.value === undefined) this.#refuse(`it is ${value.name}`);
		return plain(value);
	}

	#step(opcode: number): void {
		const stack = this.#stack;
		switch (opcode) {
			case 0x80: // PROTO
				if (this.#cursor.byte() > 5) this.#refuse("its protocol is unknown");
				break;
			case 0x95: // FRAME
				this.#cursor.length(this.#cursor.u64());
				break;
			case 0x28: // MARK
				stack.mark();
				break;
			case 0x30: // POP
				stack.drop();
				break;
			case 0x31: // POP_MARK
				stack.popMark();
				break;
			case 0x32: // DUP
				stack.push(stack.top());
				break;
			case 0x4e: // NONE
				stack.push(null);
				break;
			case 0x88: // NEWTRUE
				stack.push(true);
				break;
			case 0x89: // NEWFALSE
				stack.push(false);
				break;
			case 0x4b: // BININT1
				stack.push(this.#cursor.byte());
				break;
			case 0x4d: // BININT2
				stack.push(this.#cursor.u16());
				break;
			case 0x4a: // BININT
				stack.push(this.#cursor.i32());
				break;
			case 0x8a: // LONG1
				this.#make(this.#cursor.integer(this.#cursor.byte()));
				break;
			case 0x8b: // LONG4
				this.#make(this.#cursor.integer(this.#cursor.u32()));
				break;
			case 0x47: // BINFLOAT
				stack.push(this.#cursor.f64());
				break;
			case 0x8c: // SHORT_BINUNICODE
				this.#make(this.#cursor.text(this.#cursor.byte()));
				break;
			case 0x58: // BINUNICODE
				this.#make(this.#cursor.text(this.#cursor.u32()));
				break;
			case 0x8d: // BINUNICODE8
				this.#make(this.#cursor.text(this.#cursor.u64()));
				break;
			case 0x43: // SHORT_BINBYTES
				this.#make(this.#cursor.data(this.#cursor.byte()));
				break;
			case 0x42: // BINBYTES
				this.#make(this.#cursor.data(this.#cursor.u32()));
				break;
			case 0x8e: // BINBYTES8
				this.#make(this.#cursor.data(this.#cursor.u64()));
				break;
			case 0x55: // SHORT_BINSTRING
				this.#make(this.#cursor.latin(this.#cursor.byte()));
				break;
			case 0x54: // BINSTRING
				this.#make(this.#cursor.latin(this.#cursor.u32()));
				break;
			default:
				this.#stepContainer(opcode);
		}
	}

	#stepContainer(opcode: number): void {
		switch (opcode) {
			case 0x5d: // EMPTY_LIST
				this.#make([]);
				break;
			case 0x61: // APPEND
				this.#append([this.#stack.pop()]);
				break;
			case 0x65: // APPENDS
				this.#append(this.#stack.popMark());
				break;
			case 0x7d: // EMPTY_DICT
				this.#make(new Map());
				break;
			case 0x73: {
				// SETITEM
				const value = this.#stack.pop();
				this.#setItems([this.#stack.pop(), value]);
				break;
			}
			case 0x75: // SETITEMS
				this.#setItems(this.#stack.popMark());
				break;
			case 0x29: // EMPTY_TUPLE
				this.#make(new Tuple([]));
				break;
			case 0x85: // TUPLE1
			case 0x86: // TUPLE2
			case 0x87: // TUPLE3
				this.#make(new Tuple(this.#stack.popCount(opcode - 0x84).map(plain)));
				break;
			case 0x74: // TUPLE
				this.#makeOf(this.#stack.popMark(), (items) => new Tuple(items));
				break;
			case 0x8f: // EMPTY_SET
				this.#make(new Set());
				break;
			case 0x90: {
				// ADDITEMS
				const items = this.#stack.popMark();
				const set = this.#stack.top();
				if (!(set instanceof Set)) this.#refuse("it adds to a value that is not a set");
				this.#charge(items.length);
				for (const item of items) set.add(plain(item));
				break;
			}
			case 0x91: // FROZENSET
				this.#makeOf(this.#stack.popMark(), (items) => new Set(items));
				break;
			case 0x71: // BINPUT
				this.#stack.remember(this.#cursor.byte());
				break;
			case 0x72: // LONG_BINPUT
				this.#stack.remember(this.#cursor.u32());
				break;
			case 0x94: // MEMOIZE
				this.#stack.remember();
				break;
			case 0x68: // BINGET
				this.#stack.recall(this.#cursor.byte());
				break;
			case 0x6a: // LONG_BINGET
				this.#stack.recall(this.#cursor.u32());
				break;
			default:
				this.#stepObject(opcode);
		}
	}

	#stepObject(opcode: number): void {
		switch (opcode) {
			case 0x63: {
				// GLOBAL
				const module = this.#cursor.line();
				this.#global(module, this.#cursor.line());
				break;
			}
			case 0x93: {
				// STACK_GLOBAL
				const [module, name] = this.#stack.popCount(2);
				if (typeof module !== "string" || typeof name !== "string") {
					this.#refuse("it names a class by a value that is not text");
				}
				this.#global(module, name);
				break;
			}
			case 0x52: // REDUCE
				this.#invoke("call");
				break;
			case 0x81: // NEWOBJ
				this.#invoke("create");
				break;
			case 0x62: {
				// BUILD
				const state = plain(this.#stack.pop());
				setState(this.#stack.top(), state);
				break;
			}
			case 0x51: {
				// BINPERSID
				const id = this.#stack.pop();
				if (!this.options.persistent) this.#refuse("it refers to a storage, and there is none here");
				this.#stack.push(this.options.persistent(id));
				break;
			}
			default:
				this.#cursor.position--;
				this.#refuse(`opcode 0x${opcode.toString(16).padStart(2, "0")} is not allowed`);
		}
	}

	#global(module: string, name: string): void {
		const key = `${module} ${name}`;
		let reference = this.#references.get(key);
		if (!reference) {
			const allowed = this.options.allowed(module, name);
			if (!allowed) this.#refuse(`${module}.${name} is not on the list of allowed names`);
			reference = new Reference(new Global(module, name), allowed);
			this.#references.set(key, reference);
		}
		this.#stack.push(reference);
	}

	#invoke(how: "call" | "create"): void {
		const [callee, args] = this.#stack.popCount(2);
		if (!(callee instanceof Reference)) this.#refuse("it calls a value that is not a class");
		if (!(args instanceof Tuple)) this.#refuse(`it calls ${callee.name} without a tuple`);
		const action = callee.allowed[how];
		if (!action) this.#refuse(`${callee.name} may not be called this way`);
		// A few bytes of the pickle (BINGET) can pass a large memoized list or string to a call, which copies it.
		for (const item of args.items) this.#charge(weightOf(item));
		this.#make(action(args.items));
	}

	#append(items: unknown[]): void {
		const list = this.#stack.top();
		if (list instanceof PythonObject) list.items ??= [];
		const target = list instanceof PythonObject ? list.items : list;
		if (!Array.isArray(target)) this.#refuse("it appends to a value that is not a list");
		this.#charge(items.length / ITEMS_A_VALUE);
		for (const item of items) target.push(plain(item));
	}

	#setItems(items: unknown[]): void {
		const top = this.#stack.top();
		if (top instanceof PythonObject) top.entries ??= new Map();
		const map = top instanceof PythonObject ? top.entries : top;
		if (!(map instanceof Map) || items.length % 2 !== 0) this.#refuse("it sets items of a value that is not a dict");
		// An entry counts as two values: its key and its value.
		this.#charge(items.length);
		for (let i = 0; i < items.length; i += 2) map.set(plain(items[i]), plain(items[i + 1]));
	}
}

/** Number of values that a function may copy from an argument. */
function weightOf(value: unknown): number {
	if (Array.isArray(value)) return value.length;
	if (value instanceof Tuple) return value.items.length;
	if (value instanceof Set || value instanceof Map) return value.size;
	return typeof value === "string" ? value.length / CHARACTERS_A_VALUE : 0;
}

/** The value of a global that the pickle stores as data; other values unchanged. */
function plain(value: unknown): unknown {
	if (!(value instanceof Reference)) return value;
	return value.allowed.value ?? value.name;
}

/** Sets the state of an instance. Throws a RangeError for an instance without state, or for an invalid state. */
function setState(instance: unknown, state: unknown): void {
	if (instance instanceof PythonObject) {
		if (instance.state !== undefined) throw new RangeError(`it sets the state of a ${instance.type} twice`);
		instance.state = state;
	} else if (instance instanceof NumpyDtype) {
		const order = state instanceof Tuple ? state.items[1] : null;
		if (order !== "<" && order !== ">" && order !== "|" && order !== "=") {
			throw new RangeError("a numpy dtype has an invalid state");
		}
		instance.bigEndian = order === ">";
	} else if (instance instanceof NumpyArray) {
		setArray(instance, state);
	} else if (!(instance instanceof Map && state instanceof Map)) {
		// Attributes of an OrderedDict are dropped.
		throw new RangeError("it sets the state of a value that has no state");
	}
}

/** `state`: the argument of numpy.ndarray.__setstate__, (version, shape, dtype, Fortran order, bytes or list of objects). */
function setArray(array: NumpyArray, state: unknown): void {
	const [, shape, dtype, fortran, data] = state instanceof Tuple ? state.items : [];
	if (
		!(shape instanceof Tuple) ||
		!shape.items.every((size) => Number.isSafeInteger(size) && (size as number) >= 0) ||
		!(dtype instanceof NumpyDtype) ||
		!(data instanceof Uint8Array || Array.isArray(data))
	) {
		throw new RangeError("a numpy array has an invalid state");
	}
	array.shape = shape.items as number[];
	array.dtype = dtype;
	array.fortranOrder = fortran === true;
	array.data = data;
}
