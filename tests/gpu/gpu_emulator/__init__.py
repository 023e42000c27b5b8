"""An emulator of NVIDIA GPUs for Triton's kernels: it executes their PTX on the CPU, on the memory of CPU tensors.

Triton's interpreter runs a kernel's Python text; this runs what Triton's compiler has made of it. So it sees what the
interpreter cannot: branches compiled wrongly, offsets of 32 bits, wrong hints of alignment, arguments that a launcher has
mixed up, barriers that are missing. It checks each access to memory, searches for races, and counts instructions, bytes and
sectors.

    ptx            parses the text of a kernel
    arithmetic     what instructions compute, on arrays
    memory         global and shared memory, with all checks
    registers      the values of operands
    asynchronous   copies to shared memory and products of tensor cores, which take effect where they are waited for
    machine        executes a launch: control flow, and instructions that move data
    stream         launches and copies that are queued, and run late; CUDA graphs of them
    driver         the Triton driver whose GPU this is
    cases          rules and gradient codes, run here and by the cpu engine, and products of matrices
    planted        defects that must be noticed
    captured       training steps as CUDA graphs, and defects of these
    plugin         for pytest: runs tests of the triton engine here

Not emulated: the time that anything takes, and caches. Source of the semantics: NVIDIA, "Parallel Thread
Execution ISA", chapter 9.
"""
