// The way to Python and back: messages, the latest of each kind only, and whether anybody answers.

const PATIENCE = 3000; // milliseconds without an answer of Python until that is said
const QUIET = 5000; // milliseconds without a picture of something that changes by itself, until Python is asked for a sign
const APART = 50; // milliseconds between two messages of the same thing

export class Python {
  /**
   * @param {Send | null} send null where there is no Python
   * @param {(isLost: boolean) => void} onLost is called when Python ceases to answer, or does again
   * @param {() => boolean} isLive whether pictures should come by themselves
   */
  constructor(send, onLost, isLive) {
    this.send = send;
    this.isLost = false;
    this.onLost = onLost;
    this.heardAt = performance.now();
    /** @type {ReturnType<typeof setTimeout> | 0} */
    this.answerTimer = 0;
    /** @type {Map<string, { next: Message | null }>} by what they tell of: messages that follow when Python has had a moment */
    this.waiting = new Map();
    this.watch = setInterval(() => {
      const isQuiet = isLive() && !this.answerTimer && performance.now() - this.heardAt > QUIET;
      if (this.send && isQuiet) this.ask({ kind: "waiting" });
    }, QUIET / 5);
  }

  /**
   * Tell Python; of messages with the same key that follow each other fast, the first and the last.
   * @type {(message: Message, key?: string | null) => void}
   */
  tell(message, key = null) {
    if (!this.send) return;
    if (key === null) return this.ask(message);
    const earlier = this.waiting.get(key);
    if (earlier) {
      earlier.next = message; // the latest wins: a slider must not run ahead of Python
      return;
    }
    /** @type {{ next: Message | null }} */
    const entry = { next: null };
    this.waiting.set(key, entry);
    this.ask(message);
    setTimeout(() => {
      this.waiting.delete(key);
      if (entry.next) this.tell(entry.next, key);
    }, APART);
  }

  /** @param {Message} message */
  ask(message) {
    this.answerTimer ||= setTimeout(() => this.lose(true), PATIENCE);
    try {
      this.send?.(message);
    } catch { // as where the kernel has ended
      this.lose(true);
    }
  }

  /** Python has given a sign. */
  heard() {
    clearTimeout(this.answerTimer);
    this.answerTimer = 0;
    this.heardAt = performance.now();
    this.lose(false);
  }

  /** @param {boolean} isLost */
  lose(isLost) {
    if (isLost === this.isLost) return;
    this.isLost = isLost;
    this.onLost(isLost);
  }

  destroy() {
    clearTimeout(this.answerTimer);
    clearInterval(this.watch);
  }
}
