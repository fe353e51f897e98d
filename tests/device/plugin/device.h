// What the two halves of the fake accelerator share: guarded memory and streams.

#pragma once
#include <functional>

// The host memory behind a device address; the address itself where it is one of the host.
void* behind(const void* address);

// Run work on a stream: late, and in another thread.
void submit(void* stream, std::function<void()> work);
