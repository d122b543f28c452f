package recovery

import (
	"encoding/json"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"
)

// another sets a field to a value other than its zero value.
func another(t *testing.T, field reflect.Value) {
	t.Helper()
	switch field.Kind() {
	case reflect.Int64:
		field.SetInt(7)
	case reflect.Bool:
		field.SetBool(true)
	case reflect.String:
		field.SetString("x")
	case reflect.Pointer:
		field.Set(reflect.New(field.Type().Elem()))
	case reflect.Slice:
		field.Set(reflect.MakeSlice(field.Type(), 1, 1))
	default:
		require.Fail(t, "a field of a new kind", "%s", field.Type())
	}
}

func TestResultsThatDifferInAFieldOtherThanTheStepAreNotTheSame(t *testing.T) {
	for field := range reflect.TypeFor[Result]().Fields() {
		t.Run(field.Name, func(t *testing.T) {
			var a, b, c Result
			another(t, reflect.ValueOf(&b).Elem().FieldByName(field.Name))
			another(t, reflect.ValueOf(&c).Elem().FieldByName(field.Name))
			require.Equal(t, field.Name == "MaxStep", a.SameButStep(&b))
			require.True(t, b.SameButStep(&c))
		})
	}
}

func TestEachFieldButTheSourcesHasANameInPython(t *testing.T) {
	for field := range reflect.TypeFor[Result]().Fields() {
		var r Result
		another(t, reflect.ValueOf(&r).Elem().FieldByName(field.Name))
		before, err := json.Marshal(Result{})
		require.NoError(t, err)
		after, err := json.Marshal(r)
		require.NoError(t, err)
		require.Equal(t, field.Name == "Sources", string(before) == string(after), field.Name)
		require.Equal(t, field.Name == "Sources", field.Tag.Get("json") == "-", field.Name)
		require.NotEmpty(t, field.Tag.Get("json"), field.Name)
	}
}
