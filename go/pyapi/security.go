package pyapi

import (
	"encoding/json"
	"fmt"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/pyapi/ops"
)

// settings are what the environment says, as torchft/_security.py reads it: Go's own copy is of the moment at which this
// library was loaded.
type settings struct {
	auth.Security
	Job string `json:"job"`
	// Relay is the address of the relay that a rank asks through, RelayHost the host under which it is itself one; empty: none.
	Relay     string `json:"relay"`
	RelayHost string `json:"relay_host"`
}

// parseSecurity reads settings in JSON, and checks the files that they name.
func parseSecurity(text string) (settings, error) {
	var s settings
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return s, fmt.Errorf("security: %w", err)
	}
	return s, ops.As(ops.Value, s.Validate())
}
