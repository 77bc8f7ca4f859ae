// checksum_avx2: compiled with -mavx2; see checksum_kernel.h.
#include "checksum_kernel.h"

namespace statehold {

const ChecksumKernel kChecksumAvx2 = kChecksumOfThisFile;

}  // namespace statehold
