"""scikit-learn: a pipeline whose last step trains within each owner's budget.

python examples/sklearn_pipeline.py

PRIVATE: each individual training record, with its owner's epsilon.
NOT PRIVATE: the records on which `score` is computed, the budgets, and how many records each owner
has. Steps before the classifier must not learn from the records: a StandardScaler would release
their means without noise; a Normalizer processes each record separately.
"""

import numpy as np
import sklearn
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import Normalizer

import ownerwise as ow

X, y = make_classification(3000, n_features=12, n_informative=6, class_sep=1.5, random_state=0)
owners = np.resize(["ward a", "ward b", "ward c"], len(X))
X, X_test, y, y_test, owners, _ = train_test_split(X, y, owners, test_size=0.2, random_state=0)

with sklearn.config_context(enable_metadata_routing=True):  # passes `owners` to the classifier
    classifier = ow.PrivateClassifier(
        epsilon={"ward a": 1.0, "ward b": 3.0, "ward c": 8.0},
        classes=[0, 1],  # known in advance, not derived from the records
        input_range=(-1.0, 1.0),  # public; inputs are clipped to it
        hidden=(16,),
        steps=150,
    ).set_fit_request(owners=True)
    pipeline = Pipeline([("normalize", Normalizer()), ("classify", classifier)])
    pipeline.fit(X, y, owners=owners)

fitted = pipeline["classify"]
print(fitted.plan_.describe(owners=True))
spent = zip(fitted.plan_.owners.ids.tolist(), fitted.epsilon_.round(3).tolist(), strict=True)
print(f"\nepsilon spent per record: {dict(spent)}")
print(f"private: {fitted.private_}")
print(f"accuracy on test records (no guarantee covers them): {pipeline.score(X_test, y_test):.0%}")
