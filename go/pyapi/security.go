package pyapi

import (
	"encoding/json"
	"fmt"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/pyapi/ops"
)

// parseSecurity reads the JSON of rpc.Security that torchft/_security.py makes of the environment, and checks the files
// that it names.
func parseSecurity(text string) (rpc.Security, error) {
	var security rpc.Security
	if err := json.Unmarshal([]byte(text), &security); err != nil {
		return security, fmt.Errorf("security: %w", err)
	}
	return security, ops.As(ops.Value, security.Validate())
}
